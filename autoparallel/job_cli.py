"""Commands on jobs: ``launch``, ``manifest``, and ``checkpoint``, on what jobs have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoparallel import plan_cli
from autoparallel.errors import InputError, printable

checkpoint_app = typer.Typer(help="Checkpoints of parallel.save, without ranks.", no_args_is_help=True)
SavedIn = Annotated[Path, typer.Argument(help="the folder given to parallel.save, or one checkpoint in it")]
Step = Annotated[int | None, typer.Option(help="which one; else the newest")]


@checkpoint_app.command()
def inspect(folder: SavedIn, step: Step = None) -> None:
    """Say what a checkpoint has."""
    from autoparallel.runtime.checkpoint.offline import contents

    found = contents(folder, step)
    about = found.checkpoint
    typer.echo(f"step {about.step}, saved on {about.ranks} ranks (mesh {about.mesh_shape}) by torch "
               f"{about.torch_version}: {', '.join(about.parts)}")
    typer.echo(f"{len(found.weights)} weights of {found.weight_bytes} bytes, optimizer {found.optimizer_bytes} bytes")
    for entry in found.weights:
        typer.echo(printable(f"  {entry.name} {str(entry.dtype).removeprefix('torch.')}{list(entry.shape)}"))


@checkpoint_app.command()
def verify(folder: SavedIn, step: Step = None) -> None:
    """Read all weights; fails where one cannot be read, or has values that are not finite."""
    from autoparallel.runtime.checkpoint.offline import contents
    from autoparallel.runtime.checkpoint.offline import verify as read_all

    found = contents(folder, step)
    if odd := read_all(found):
        raise InputError(f"{found.checkpoint.path} has values that are not finite in {odd[:5]}, {len(odd)} in all")
    typer.echo(f"{found.checkpoint.path}: {len(found.weights)} weights read")


@checkpoint_app.command()
def convert(
    folder: SavedIn,
    output: Annotated[Path, typer.Argument(help="a new or empty folder for safetensors files")],
    step: Step = None,
    max_shard_size: Annotated[str, typer.Option(help="of a file, at most, as 500MB or 5GB")] = "5GB",
) -> None:
    """Write a checkpoint's weights as safetensors files, under the model's names."""
    from autoparallel.runtime.checkpoint.offline import contents, to_safetensors

    to_safetensors(contents(folder, step), output, max_shard_size)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(checkpoint_app, name="checkpoint")
    for command in (launch, host_list, manifest):
        app.command()(command)


def launch(
    words: Annotated[list[str], typer.Argument(metavar="[PLAN.json] -- COMMAND", help="a plan, and what to run")],
    ranks: Annotated[int | None, typer.Option(min=1, help="processes on this host; by default the plan's")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="hosts; run the same command on each")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="which host this is, from 0")] = 0,
    master: Annotated[str | None, typer.Option(help="host:port of host 0, if there are several, or of "
                                          "autoparallel host-list")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="start all ranks again so often if one fails")] = 0,
    min_ranks: Annotated[int | None, typer.Option(min=1, help="go on without ranks that were killed, if so many are "
                                                  "left")] = None,
    min_nodes: Annotated[int | None, typer.Option(min=1, help="of --nodes: start and go on with so many hosts")] = None,
    join_timeout: Annotated[float, typer.Option(min=1, help="seconds for which hosts wait for each other")] = 600.0,
    model: Annotated[str | None, typer.Option(help="the plan's model, as for autoparallel plan: with --min-ranks or "
                                              "--min-nodes those left get a new plan (autoparallel replan)")] = None,
) -> None:
    """Run a script on local processes; in it autoparallel.init() makes process group, device and the plan's mesh.

    autoparallel launch plan.json -- python train.py --lr 3e-4
    """
    from autoparallel.launch.agent import run_command

    plan_file = Path(words[0]) if words[0].endswith((".json", ".json.gz")) else None
    command = words if plan_file is None else words[1:]
    if model is not None and (plan_file is None or (min_ranks is None and min_nodes is None)):
        raise InputError("--model is of a plan for the ranks left: give PLAN.json and --min-ranks (or --min-nodes) too")
    done = run_command(command, plan=plan_file, ranks=ranks, nodes=nodes, node_rank=node_rank, master=master,
                       max_restarts=max_restarts, min_ranks=min_ranks, min_nodes=min_nodes,
                       join_timeout_s=join_timeout, model=model)
    raise typer.Exit(0 if done else 1)


def host_list(
    port: Annotated[int, typer.Option(min=1, max=65535, help="where it listens")] = 29500,
) -> None:
    """Keep the list of hosts of one job of launch --min-nodes, on a machine that is none of them: it then goes on when
    any host is lost, the first too.

    autoparallel host-list --port 29500
    """
    from autoparallel.launch.host_list import serve

    serve(port)


def manifest(
    words: Annotated[list[str], typer.Argument(metavar="[PLAN.json] -- COMMAND", help="the plan (none with --servers), "
                                               "and what a rank runs (but for ranktable)")],
    to: Annotated[str, typer.Option(help="slurm, kubeflow, pytorchjob, jobset, skypilot, ray, mpi or ranktable")],
    nodes: Annotated[int | None, typer.Option(min=1, help="hosts; left out, as many as --hosts names, or as the "
                                             "plan's devices take on its cluster (1, if that is of your own "
                                             "TOML file)")] = None,
    name: Annotated[str, typer.Option(help="name of the job")] = "train",
    image: Annotated[str | None, typer.Option(help="container image with autoparallel and the script")] = None,
    hosts: Annotated[str | None, typer.Option(help="addresses a,b,... (or @ranktable.json) for mpi, ranktable")] = None,
    gpus: Annotated[bool | None, typer.Option(help="whether each process (of servers' jobs: each worker) takes a GPU; "
                                              "by default as the plan's devices are; required where these have a "
                                              "name of your own")] = None,
    servers: Annotated[int, typer.Option(min=0, help="parameter servers, for kubeflow: a job of a scheduler, servers "
                                         "and workers, without a plan")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="workers of --servers; 1 by default")] = None,
    claim: Annotated[str | None, typer.Option(help="PersistentVolumeClaim for the servers' checkpoint_dir")] = None,
    output: Annotated[Path | None, typer.Option(help="write it here instead of printing it")] = None,
) -> None:
    """Write the file with which a platform starts the plan's job.

    autoparallel manifest plan.json --to slurm --nodes 4 -- python train.py
    autoparallel manifest --to kubeflow --servers 2 --workers 8 --image me/train:1 -- python train.py
    """
    from autoparallel.launch.manifest import Job, check_options, manifest, takes_gpus, usual_hosts
    from autoparallel.launch.role_manifest import RoleJob, role_manifest
    from autoparallel.plans import Plan

    plan_cli.check_output(output)
    check_options(to, words, servers > 0, {"--image": image, "--hosts": hosts, "--nodes": nodes, "--claim": claim,
                                           "--workers": workers, "--gpus or --no-gpus": gpus})
    if servers:
        text = role_manifest(to, RoleJob(name, servers, workers or 1, tuple(words), image, gpus is not False, claim))
    else:
        named, saved = _hosts(hosts), Plan.load(words[0])
        nodes = nodes or len(named) or usual_hosts(saved)
        job = Job(name, saved, str(Path(words[0]).resolve()), nodes, tuple(words[1:]), image,
                  takes_gpus(to, saved) if gpus is None else gpus, named)
        text = manifest(to, job)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)


def _hosts(text: str | None) -> tuple[str, ...]:
    from autoparallel.launch.rank_table import table_hosts

    if not text or text.startswith("@"):
        return table_hosts(Path(text[1:])) if text else ()
    named = tuple(host.strip() for host in text.split(","))
    if not all(named):
        raise InputError(f"--hosts {text} names a host without an address: write addresses with , between them, a,b")
    return named
