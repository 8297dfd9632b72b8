"""The command line: ``autoparallel plan``, ``show``, ``verify``, ``launch``, ``manifest``, ``demo``, ``calibrate``, ...

Exit codes: `EXIT_CODES`. What takes long is imported by the command that needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import errno
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from autoparallel import capacity_cli, clock, job_cli, plan_cli
from autoparallel.errors import AutoparallelError, InfeasibleError, InputError, printable
from autoparallel.models import dtype_on, load_model, load_planned
from autoparallel.plans.reports.units import bytes_of
from autoparallel.schedule.fusion import AUTO_SIZE
from autoparallel.schedule.schedules import SCHEDULES, usual
from autoparallel.schedule.tiers import places_in

if TYPE_CHECKING:
    from autoparallel.planning.by_hand import ByHand
    from autoparallel.plans import Plan

#: What each exit code of a command means; docs/concepts/cli.md has the same.
EXIT_CODES = {
    0: "done",
    1: "a job that was started failed (launch, demo), a check failed (doctor, selftest), or two plans differ (diff)",
    2: "a mistake in the call, or another error, told in one message",
    3: "no plan fits, or nothing that was tried will do (plan, advise, fit, size, study, replan, ...)",
    130: "interrupted; launch: 128 and the number of the signal that ended it",
}
app = typer.Typer(help="The fastest correct way to run a PyTorch model on these devices.", no_args_is_help=True,
                  pretty_exceptions_enable=False,
                  epilog=f"Exit codes: {'; '.join(f'{code} {means}' for code, means in EXIT_CODES.items())}.")


@app.command()
def plan(
    model: plan_cli.Model,
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")] = "h100-sxm",
    devices: Annotated[int | None, typer.Option(min=1, help="how many devices; 8 by default, or those of --mesh")
                       ] = None,
    mesh: Annotated[str | None, typer.Option(help="fix the axes, for example 8x8 (slowest links first); else the "
                                             "search chooses them")] = None,
    software: plan_cli.Software = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences (or images) per step; 2 for each device "
                                                     "by default")] = None,
    sequence_length: plan_cli.SequenceLength = None,
    search: Annotated[str, typer.Option(help="the algorithm: exact (elimination), ilp (an integer program), recursive "
                                           "(axis by axis, quick), or auto, by the problem's size")] = "auto",
    memory_limit: plan_cli.MemoryLimit = None,
    dtype: plan_cli.Dtype = None,
    optimizer: plan_cli.Optimizer = "adamw",
    baseline: Annotated[str | None, typer.Option(help="a classical plan in place of the search's own: ddp, fsdp, "
                                                 "tensor_parallel or sequence_parallel")] = None,
    by_hand: Annotated[str | None, typer.Option(help="price this plan: dp=8,tp=8,pp=4,micro_batch=1,... or @file of "
                                                "Megatron-LM, DeepSpeed, accelerate or torchtitan")] = None,
    compare_by_hand: Annotated[str | None, typer.Option(help="compare our plan with this one (or @file), or with the "
                                                        "'usual' one for so many devices (the default), or 'none'")
                               ] = None,
    joint: Annotated[bool, typer.Option(help="search pipeline, micro-batches, ZeRO and recompute too")] = False,
    pipeline_stages: Annotated[int | None, typer.Option(help="pipeline stages (on the mesh's first axis); 1 by "
                                                        "default, unless --joint searches")] = None,
    micro_batches: Annotated[str | None, typer.Option(help="parts of the batch, one after the other, as 8; or how many "
                                                      "each rank of the mesh's first axis runs, as 3,3,1,1; 1 by "
                                                      "default where the step fits, unless --joint searches")] = None,
    stage_replicas: Annotated[str | None, typer.Option(help="ranks that share each stage's batch, as 1,3")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"{' or '.join(SCHEDULES)}; by default {usual()}, or {usual(2)} "
                                                 "with several stages a rank")] = None,
    zero_stage: Annotated[int | None, typer.Option(help="0, 1, 2 or 3; by default the search decides")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective, all_but_attention, full, offload or auto; "
                                                  "none by default where it fits, unless --joint searches")] = None,
    saved_on: Annotated[str | None, typer.Option(help="where what --recompute selective or offload saves of blocks "
                                                 "waits: device, host or disk; of offload host by default")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="sum gradients in float32, bfloat16 or float16; by default "
                                                     "in the parameters' dtype")] = None,
    bucket_bytes: Annotated[str | None, typer.Option(help="the most bytes of gradients or parameters that are sent "
                                                     "together, as 100MiB, or by mesh axis 'data=100MiB,model=5MiB'; "
                                                     "auto: by price; by default the smallest of 25, 50, 100 and "
                                                     "200 MiB that is nearly as fast as the best of them")] = None,
    buckets: Annotated[str | None, typer.Option(help="the most parameters that are sent together, as 20; or patterns "
                                                "of names, each of one bucket, as 'layers.0.*,head.*'")] = None,
    copies: Annotated[int | None, typer.Option(help="micro-batches that run at a time (multi-copy); 1 by default, "
                                               "unless --joint searches")] = None,
    pieces: Annotated[int | None, typer.Option(help="cut layers whose operand or result is sent into so many pieces: "
                                               "one travels while the next is computed; by default the search "
                                               "decides")] = None,
    offload: Annotated[str | None, typer.Option(help="where training state lives: none (on the device; the default), "
                                               "host (optimizer states and gradients), parameters (these too), "
                                               "disk (optimizer states), or the tiers of parameters, gradients and "
                                               "states as host/host/disk; by parameters' names "
                                               "'embed*=disk,*=host'; auto: by price")] = None,
    offload_fraction: Annotated[float | None, typer.Option(help="with --offload host or disk: the share of optimizer "
                                                          "states that moves, as 0.5; all by default")] = None,
    step_in_backward: Annotated[bool, typer.Option("--step-in-backward", help="step parameters while backward "
                                                   "goes on, and let each gradient go then")] = False,
    host_memory_limit: Annotated[str | None, typer.Option(help="host memory that each device may take, for example "
                                                           "200GiB; by default its share of the host's")] = None,
    disk_limit: Annotated[str | None, typer.Option(help="disk space that each device may take, for example 1TB; no "
                                                    "limit by default")] = None,
    explain: Annotated[list[str] | None, typer.Option(help="an op, parameter or input: say what each of its "
                                                      "strategies costs")] = None,
    alternatives: Annotated[int, typer.Option(min=0, help="find so many other plans, and say how much slower they "
                                                   "are")] = 0,
    sensitivity: Annotated[bool, typer.Option(help="say what half or twice the bandwidth or memory would mean "
                                              "(--html always does)")] = False,
    time_limit: Annotated[float | None, typer.Option(
        min=0, help=f"limit of the search's work in seconds, counted as of two idle cores; {clock.LIMIT_S:g} by "
        f"default, with --joint {clock.JOINT_LIMIT_S:g}")] = None,
    output: Annotated[Path | None, typer.Option(help="write the plan here as JSON")] = None,
    html: plan_cli.Html = None,
    trace: plan_cli.Trace = None,
    details: plan_cli.Details = False,
    as_json: plan_cli.AsJson = False,
    quiet: plan_cli.Quiet = False,
) -> None:
    """Plan one training step; needs no devices and loads no weights."""
    import autoparallel

    plan_cli.check_output(output)
    plan_cli.check_output(trace, "--trace")
    plan_cli.check_page(html)
    plan_cli.check_apart(output=output, html=html, trace=trace)
    plan_cli.check_details(details, quiet, as_json)
    shape = _mesh_shape(mesh)
    count = devices if devices is not None else math.prod(shape) if shape else 8
    if shape and math.prod(shape) != count:
        raise InputError(f"--mesh {mesh} has {math.prod(shape)} devices and --devices says {count}: give one of them")
    machine = autoparallel.Cluster.load(cluster, num_devices=count, software=software)
    by_hand, compare_by_hand = _by_hand(by_hand, count), _by_hand(compare_by_hand, count)
    if compare_by_hand is None and by_hand is None and baseline is None:
        compare_by_hand = "usual"
    elif compare_by_hand == "none":
        compare_by_hand = None
    network, args, kwargs = load_model(model, global_batch or 2 * count, sequence_length,
                                       dtype_on([machine], model, dtype))
    unanswered: AutoparallelError | None = None
    if explain:  # a wrong name is refused before the search, which takes long
        from autoparallel.capture import capture
        from autoparallel.planning.study import check_names

        check_names(capture(network, args, kwargs), explain)
    time_limit = clock.limit_s(joint) if time_limit is None else time_limit
    with plan_cli.Progress(time_limit, quiet) as progress:
        made = autoparallel.plan(
            network, machine, example_inputs=args, example_kwargs=kwargs, mesh_shape=shape, search=search,
            memory_limit_bytes=bytes_of(memory_limit), optimizer=optimizer, baseline=baseline, time_limit_s=time_limit,
            joint=joint, by_hand=by_hand, compare_by_hand=compare_by_hand, pipeline_stages=pipeline_stages,
            micro_batches=_micro_batches(micro_batches), schedule=schedule,
            stage_replicas=_sizes(stage_replicas, "the stages' ranks", ",", "1,3"),
            zero_stage=zero_stage, recompute=recompute, saved_on=saved_on, reduce_dtype=reduce_dtype,
            bucket_bytes=_bucket_bytes(bucket_bytes), buckets=_buckets(buckets), copies=copies, pieces=pieces,
            offload=_tiers(offload),
            offload_fraction=offload_fraction, step_in_backward=step_in_backward or None,
            host_memory_limit_bytes=bytes_of(host_memory_limit, "--host-memory-limit"),
            disk_limit_bytes=bytes_of(disk_limit, "--disk-limit"),
            progress=progress,
        )
        if output is not None:  # first: what follows may fail
            made.save(output)
        sensitivity = sensitivity or (html is not None and made.study is not None)
        if explain or alternatives or sensitivity:
            progress.says("the plan is found; answers to --explain, --alternatives and --sensitivity")
            made, unanswered = _answered(made, explain or (), alternatives, sensitivity)
            if output is not None:
                made.save(output)
    plan_cli.tell(made, details, as_json, quiet, html, trace)
    if output is not None and not (quiet or as_json):
        typer.echo(f"plan written to {output}")
    if unanswered is not None:  # last: the plan took long to find
        raise unanswered


def _answered(made: Plan, explain: Sequence[str], alternatives: int, sensitivity: bool
              ) -> tuple[Plan, AutoparallelError | None]:
    """The plan with answers to these questions, and the error that kept some from being answered."""
    from autoparallel.plans.reports.asked import ask

    unanswered: AutoparallelError | None = None
    try:
        made = ask(made, explain, alternatives, sensitivity)
    except AutoparallelError as error:
        unanswered = error
    except KeyboardInterrupt:
        typer.echo("interrupted: what follows is without the answers", err=True)
    if alternatives and made.record is not None and not made.record.alternatives:
        typer.echo("no other plan was found in the time", err=True)
    return made, unanswered


plan_cli.add_to(app)
capacity_cli.add_to(app)
job_cli.add_to(app)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, help="local processes")] = 4,
    mesh: Annotated[str | None, typer.Option(help="axes, for example 2x2")] = None,
) -> None:
    """Plan a small Llama, train it on local processes, and compare with one process."""
    from autoparallel import demo as job

    shape = _mesh_shape(mesh) or ((2, ranks // 2) if ranks % 2 == 0 and ranks > 2 else (ranks,))
    if math.prod(shape) != ranks:
        raise InputError(f"--mesh {mesh} has {math.prod(shape)} devices, and --ranks is {ranks}: give --ranks "
                         f"{math.prod(shape)}, or another mesh")
    raise typer.Exit(0 if job.main(ranks, shape) else 1)


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="a plan's file")],
    to: Annotated[str, typer.Option(help="fsdp2, torchtitan, megatron, deepspeed or accelerate")],
    output: Annotated[Path | None, typer.Option(help="a folder for the files; without it they are printed")] = None,
    model: Annotated[str | None, typer.Option(help="the plan's model, as for autoparallel plan: prices what was "
                                              "exported")] = None,
    cluster: Annotated[str | None, typer.Option(help="with --model: the plan's cluster, if it was a TOML file")] = None,
) -> None:
    """Write a plan as files of another framework, and list what these cannot say.

    autoparallel export plan.json --to megatron --output megatron/
    """
    import autoparallel
    from autoparallel.plans.reports.units import bytes_str, seconds_str

    if cluster is not None and model is None:
        raise InputError(f"--cluster {cluster} prices what was exported of a model: give --model too, or leave it out")
    plan_cli.check_folder(output)
    searched = autoparallel.Plan.load(plan)
    made = autoparallel.export_plan(searched, to)
    if output is None:
        for text in made.files.values():
            typer.echo(printable(text), nl=False)
    else:
        for path in made.save(output):
            typer.echo(f"written: {path}")
    for one in made.lost:
        price = "" if one.seconds is None else f" (+{seconds_str(one.seconds)} a step)"
        typer.secho(printable(f"not expressed: {one.what}; instead: {one.instead}{price}"), err=True)
    if model is None:
        typer.secho(f"--model MODEL prices what was exported, and says whether it fits: {made.by_hand}", err=True)
    else:
        priced = _priced(searched, made.by_hand, model, cluster).prediction
        typer.secho(f"what was exported, {made.by_hand}: a step takes {seconds_str(priced.step_s)}, and the plan's "
                    f"{seconds_str(searched.prediction.step_s)}", err=True)
        if 0 < (limit := searched.prediction.limit_bytes) < priced.peak_bytes:
            typer.secho(f"it does not fit: {bytes_str(priced.peak_bytes)} a device of the {bytes_str(limit)} that "
                        "tensors may take. Plan what the framework can say, as --by-hand 'dp=8,zero=3,recompute=auto', "
                        "and export that", err=True, fg=typer.colors.RED)


def _priced(searched: Plan, by_hand: ByHand, model: str, cluster: str | None) -> Plan:
    """The plan by hand for the model, batch, devices, software and optimizer of a plan."""
    import autoparallel
    from autoparallel.replanning import optimizer_of

    plan_cli.tell_figures(searched, cluster)
    machine = plan_cli.cluster_of(searched, cluster, math.prod(searched.axes[0]))
    network, args, kwargs = load_planned(model, searched.model.inputs, searched.model.dtype)
    return autoparallel.plan(network, machine, example_inputs=args, example_kwargs=kwargs, by_hand=by_hand,
                             optimizer=optimizer_of(searched))


@app.command()
def advise(
    model: plan_cli.Model,
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")] = "h100-sxm",
    devices: Annotated[int, typer.Option(min=1, help="how many")] = 8,
    software: plan_cli.Software = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences per step; 2 for each device by "
                                                     "default")] = None,
    sequence_length: plan_cli.SequenceLength = None,
    memory_limit: plan_cli.MemoryLimit = None,
    dtype: plan_cli.Dtype = None,
    optimizer: plan_cli.Optimizer = "adamw",
    time_limit: Annotated[float, typer.Option(min=0, help="seconds of a joint search, added to plans by hand; 0: "
                                              "none")] = 5.0,
    uneven: Annotated[float, typer.Option(min=0, max=1, help="by how much workers' steps vary, for parameter servers; "
                                          "0.3: 30 %")] = 0.0,
    output: Annotated[Path | None, typer.Option(help="a folder for the plan, and for its files by framework")] = None,
) -> None:
    """Say which of data, tensor, pipeline, ZeRO and recompute to use, what each costs, and what to write; exit code 3
    if nothing fits."""
    import autoparallel
    from autoparallel.advice import print_advice
    from autoparallel.plans.reports.text import ReportConsole

    plan_cli.check_folder(output)
    machine = autoparallel.Cluster.load(cluster, num_devices=devices, software=software)
    network, args, kwargs = load_model(model, global_batch or 2 * devices, sequence_length,
                                       dtype_on([machine], model, dtype))
    with plan_cli.Progress(time_limit) as progress:
        found = autoparallel.advise(network, machine, example_inputs=args, example_kwargs=kwargs, optimizer=optimizer,
                                    memory_limit_bytes=bytes_of(memory_limit), search_s=time_limit, uneven=uneven,
                                    progress=progress.says)
    print_advice(found, ReportConsole())
    if found.best is None and found.searched is None:
        raise typer.Exit(3)
    best = found.searched if found.best is None else found.best.plan
    if output is not None and best is not None:
        output.mkdir(parents=True, exist_ok=True)
        best.save(output / "plan.json")
        for name, made in found.exports.items():
            if not isinstance(made, str):
                made.save(output / name)
        folders = " and a folder for each framework" if found.exports else ""
        typer.echo(f"plan.json{folders}: {output}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Megatron-LM's arguments (any text), DeepSpeed's .json, accelerate's "
                                         ".yaml, a torchtitan recipe (.py)")],
    devices: Annotated[int | None, typer.Option(min=1, help="devices of the job, for files that do not state them")
                       ] = None,
) -> None:
    """Print another framework's settings as a plan by hand, for --by-hand and --compare-by-hand."""
    typer.echo(_by_hand(f"@{file}", devices))


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option(help="write the cluster description (TOML) here")],
    ranks: Annotated[int, typer.Option(min=1, help="local processes, where torchrun did not start any")] = 2,
    nics_per_host: Annotated[int | None, typer.Option(min=1, help="network cards that devices of a host share")] = None,
    links: Annotated[str | None, typer.Option(help="devices that each link but the outermost joins, innermost first: "
                                              "8,32 where a rack of 32 has a network of its own; a host's by default")
                     ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="measurements of each call")] = 9,
) -> None:
    """Measure ops and collectives on the machines at hand, and write a description for --cluster.

    Alone it measures local processes; on several machines start it by torchrun on each.
    """
    from autoparallel.calibration import job

    plan_cli.check_output(output)
    job.main(output, ranks, nics_per_host, repeats, _sizes(links, "the links' devices", ",", "8,32") or ())


@app.command("verify")
def verify_plan(
    given: Annotated[list[str], typer.Argument(metavar="[PLAN.json --] MODEL", help="a plan's file, if there is one, "
                                               "and a Hugging Face config file (JSON) or module:function")],
    plan: Annotated[Path | None, typer.Option(help="a plan's file; else one is searched")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="local processes, where torchrun, srun or mpirun did not "
                                              "start any; the plan's devices by default, without a plan 4")] = None,
    cluster: Annotated[str | None, typer.Option(help="a cluster's name or TOML file; else as the devices "
                                                "suggest")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences (or images) per step; the plan's by "
                                                     "default, without a plan 8")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="tokens per sequence; the plan's by default, "
                                                        "without a plan 128")] = None,
    dtype: Annotated[str | None, typer.Option(help="of a config's model: bfloat16, float16, float32 or float64; the "
                                              "plan's by default, without a plan float32")] = None,
    backend: Annotated[str, typer.Option(help="eager, inductor or auto")] = "eager",
    steps: Annotated[int, typer.Option(min=1, help="steps to measure")] = 10,
    output: Annotated[Path | None, typer.Option(help="write the corrected cluster (TOML) here, for --cluster")] = None,
) -> None:
    """Run steps of a plan, and print predicted beside measured."""
    from autoparallel import verification

    *plans, model = given
    if late := next((word for word in given if word.startswith("-")), None):
        raise InputError(f"{late} stands after --, where only the model may: write autoparallel verify {late} ... "
                         "plan.json -- MODEL")
    if len(plans) > 1 or (plans and plan is not None):
        raise InputError(f"verify takes one plan and one model, not {' '.join(given)}: write autoparallel verify "
                         "plan.json -- MODEL")
    plan = Path(plans[0]) if plans else plan
    if output is not None:
        plan_cli.check_output(output)
    asked = verification.Request(model, global_batch, sequence_length, dtype, plan, cluster, backend, steps)
    verification.main(asked, ranks, output)


@app.command()
def selftest(
    minutes: Annotated[float, typer.Option(min=0, help="begin no check after so many")] = 10.0,
    ranks: Annotated[int, typer.Option(min=2, help="local processes, where torchrun, srun or mpirun did not start any; "
                                       "on GPUs one each if there are as many")] = 4,
    models: Annotated[str | None, typer.Option(help="of the equality checks, with commas between: mlp,images,llama,"
                                               "gpt2,bert,t5,mixtral")] = None,
    backends: Annotated[str, typer.Option(help="with commas between: eager, aot_eager, inductor")] = "eager",
    rounds: Annotated[int, typer.Option(min=1, help="steps of each side of a race")] = 20,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; local ranks share GPUs where there are fewer "
                                               "[default: cuda where there is a GPU each, else cpu]")] = None,
    output: Annotated[Path | None, typer.Option(help="write the results here as .json, and a page beside it as "
                                                ".md")] = None,
) -> None:
    """Check on the devices at hand: numbers against one process, predicted times, speed beside DDP and FSDP2.

    Exit code 1 if a check failed.
    """
    from autoparallel.selftest import job
    from autoparallel.selftest.subjects import SUBJECTS

    if output is not None:
        plan_cli.check_output(output)
    names = tuple(models.split(",")) if models else tuple(SUBJECTS)
    if not job.main(job.Request(ranks, minutes, names, tuple(backends.split(",")), rounds, device), output):
        raise typer.Exit(1)


@app.command()
def clusters(
    cluster: Annotated[str | None, typer.Argument(help="a known cluster, or a TOML file, to describe")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="number of devices (default: the description's)")] = None,
) -> None:
    """List the known clusters; or say what one is: its devices by kind, and the links that join them."""
    from cost_models import Cluster, known_clusters, unequal

    if cluster is None and devices is not None:
        raise InputError(f"--devices {devices} is of one cluster: name it, as autoparallel clusters h100-sxm --devices "
                         f"{devices}, or leave it out")
    if cluster is None:
        for name in known_clusters():
            typer.echo(name)
        return
    for line in unequal.lines(Cluster.load(cluster, devices)):
        typer.echo(line)


def _by_hand(text: str | None, devices: int | None) -> str | None:
    """A plan by hand as text; of ``@file``, as the file says it."""
    if text is None or not text.startswith("@"):
        return text
    import autoparallel

    found = autoparallel.import_plan(text[1:], devices)
    for name in found.ignored:
        typer.secho(printable(f"{text[1:]}: {name} is not part of a plan by hand: left out"), fg="yellow", err=True)
    for one in found.missing:
        typer.secho(printable(f"{text[1:]} does not state {one}"), fg="yellow", err=True)
    return str(found.by_hand)


def _mesh_shape(text: str | None) -> tuple[int, ...] | None:
    return _sizes(text, "the mesh", "x", "8x8")


def _micro_batches(text: str | None) -> int | tuple[int, ...] | None:
    found = _sizes(text, "the micro-batches", ",", "8, or 3,3,1,1 by rank")
    return found[0] if found is not None and len(found) == 1 else found


def _sizes(text: str | None, what: str, between: str, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split(between)
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise InputError(f"cannot read {what} {text!r}: write sizes with {between} between them, for example {example}")
    return tuple(int(p) for p in parts)


def _bucket_bytes(text: str | None) -> float | str | dict[str, float] | None:
    """The value of the option ``bucket_bytes``, of all axes or by axis."""
    if text is None or text == AUTO_SIZE:
        return text
    parts = [part.rpartition("=") for part in text.split(",")]
    try:
        sizes = {axis: bytes_of(size) or 0.0 for axis, _, size in parts}
    except InputError:
        sizes = {}
    if len(sizes) < len(parts) or (len(parts) > 1 and "" in sizes):
        raise InputError(f"cannot read --bucket-bytes {text!r}: write bytes, as 100MiB or 1e8, or each axis once, as "
                         "data=100MiB,model=5MiB, or auto")
    return sizes.get("", sizes)


def _buckets(text: str | None) -> int | list[str] | None:
    """The value of the option ``buckets``."""
    if text is None:
        return None
    return int(text) if text.isdecimal() else text.split(",")


def _tiers(text: str | None) -> str | dict[str, str] | None:
    """The value of the option ``offload``, of one tier or by names."""
    if text is None:
        return None
    if len(found := places_in(text)) > 1:
        raise InputError(f"--offload {text}: give one tier for all parameters, or by names 'embed*=disk,*=host'")
    return found[0]


def main() -> None:
    """Entry point: errors of our own tree, and a full disk, are printed without a traceback. Where the terminal's
    encoding lacks a character, another one is printed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except AutoparallelError as error:
        _end(printable(str(error)), 3 if isinstance(error, InfeasibleError) else 2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stdout = io.StringIO()    # which Python flushes when it ends
        _end(f"the output could not be written: {error.strerror}", 2)


def _end(message: str, code: int) -> NoReturn:
    """Exit with the code, also where the message cannot be written (code 1 has another meaning)."""
    try:
        typer.secho(f"error: {message}", fg="red", err=True)
    except OSError:
        sys.stderr = io.StringIO()    # which Python flushes when it ends
    raise SystemExit(code) from None
