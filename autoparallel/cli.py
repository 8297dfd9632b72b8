"""The command line: ``autoparallel plan``, ``demo``, ``calibrate`` and ``clusters``."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.errors import AutoparallelError, InputError, printable, shown

if TYPE_CHECKING:
    from torch import nn

app = typer.Typer(help="The fastest correct way to run a PyTorch model on these devices.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="a Hugging Face config file (JSON), or module:function")],
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")] = "h100-sxm",
    devices: Annotated[int | None, typer.Option(min=1, help="how many devices; the search chooses the axes")] = None,
    mesh: Annotated[str | None, typer.Option(help="fix the axes, for example 8x8 (slowest links first)")] = None,
    global_batch: Annotated[int, typer.Option(min=1, help="sequences (or images) per step")] = 16,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 2048,
    search: Annotated[str, typer.Option(help="auto, ilp, recursive or exact")] = "auto",
    memory_limit: Annotated[str | None, typer.Option(help="per device, for example 70GiB")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    optimizer: Annotated[str, typer.Option(help="whose state is counted: adamw, sgd, ...")] = "adamw",
    baseline: Annotated[str | None, typer.Option(help="ddp, fsdp, tensor_parallel, sequence_parallel")] = None,
    joint: Annotated[bool, typer.Option(help="search pipeline, micro-batches, ZeRO and recompute too")] = False,
    pipeline_stages: Annotated[int | None, typer.Option(help="pipeline stages (on the mesh's first axis)")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="turns over the batch")] = None,
    stage_replicas: Annotated[str | None, typer.Option(help="ranks that take turns on each stage, as 1,3")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved or zero_bubble")] = None,
    zero_stage: Annotated[int | None, typer.Option(help="0, 1, 2 or 3")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective, full, offload or auto")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="sum gradients in float32, bfloat16 or float16")] = None,
    explain: Annotated[str | None, typer.Option(help="an op, parameter or input: what its strategies cost")] = None,
    sensitivity: Annotated[bool, typer.Option(help="what half or twice the bandwidth or memory would mean")] = False,
    time_limit: Annotated[float, typer.Option(help="seconds for the search")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="write the plan here as JSON")] = None,
) -> None:
    """Plan one training step; needs no devices and loads no weights."""
    from rich.console import Console

    import autoparallel
    from autoparallel.plans.text import ReportConsole, explanation, print_report, sensitivities

    _check_output(output)
    shape = _mesh_shape(mesh)
    count = devices if devices is not None else _product(shape) if shape else 8
    if shape and _product(shape) != count:
        raise InputError(f"--mesh {mesh} has {_product(shape)} devices and --devices says {count}: give one of them")
    machine = autoparallel.Cluster.load(cluster, num_devices=count)
    network, args, kwargs = load_model(model, global_batch, sequence_length, dtype)
    with Console(stderr=True).status("capture and prices") as status:  # shown on a terminal only
        made = autoparallel.plan(
            network, machine, example_inputs=args, example_kwargs=kwargs, mesh_shape=shape, search=search,
            memory_limit_bytes=_bytes(memory_limit), optimizer=optimizer, baseline=baseline, time_limit_s=time_limit,
            joint=joint, pipeline_stages=pipeline_stages, micro_batches=micro_batches, schedule=schedule,
            stage_replicas=_sizes(stage_replicas, "the stages' ranks", ",", "1,3"),
            zero_stage=zero_stage, recompute=recompute, reduce_dtype=reduce_dtype,
            progress=lambda *state: status.update(progress_line(*state)),
        )
    if output is not None:  # first: what follows may fail
        made.save(output)
    console = ReportConsole()
    print_report(made, console)
    if output is not None:
        typer.echo(f"plan written to {output}")
    if explain is not None:
        console.print(explanation(explain, made.explain(explain)))
    if sensitivity:
        console.print(sensitivities(made.prediction.step_s, made.sensitivity()))


def progress_line(phase: str, best_s: float, bound_s: float) -> str:
    """How far the search is, in a line."""
    if best_s == float("inf"):
        return f"search ({phase}): no plan yet, none below {bound_s:.4g} s; Ctrl-C ends the search"
    gap = (best_s - bound_s) / best_s if best_s > 0 else 0.0
    return f"search ({phase}): best {best_s:.4g} s, bound {bound_s:.4g} s, gap {gap:.2%}; Ctrl-C takes the best"


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, help="local processes")] = 4,
    mesh: Annotated[str | None, typer.Option(help="axes, for example 2x2")] = None,
) -> None:
    """Plan a small Llama, train it on local processes, and compare with one process."""
    from autoparallel import demo as job

    shape = _mesh_shape(mesh) or ((2, ranks // 2) if ranks % 2 == 0 and ranks > 2 else (ranks,))
    if _product(shape) != ranks:
        raise InputError(f"--mesh {mesh} has {_product(shape)} devices and there are {ranks} ranks")
    raise typer.Exit(0 if job.main(ranks, shape) else 1)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option(help="write the cluster description (TOML) here")],
    ranks: Annotated[int, typer.Option(min=1, help="local processes, where torchrun did not start any")] = 2,
    nics_per_host: Annotated[int | None, typer.Option(min=1, help="network cards that devices of a host share")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="measurements of each call")] = 9,
) -> None:
    """Measure ops and collectives on the machines at hand, and write a description for --cluster.

    Alone it measures local processes; on several machines start it by torchrun on each.
    """
    from autoparallel.calibration import job

    _check_output(output)
    job.main(output, ranks, nics_per_host, repeats)


@app.command()
def clusters() -> None:
    """List the known clusters."""
    from cost_models import known_clusters

    for name in known_clusters():
        typer.echo(name)


def load_model(
    source: str | dict[str, Any], global_batch: int, sequence_length: int, dtype: str
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) on the meta device, from a Hugging Face config (file or dict) or a ``module:function``.

    The factory is called as ``function(global_batch, sequence_length)`` and returns (model, args, kwargs).
    """
    import torch

    precision = getattr(torch, dtype, None)
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise InputError(f"unknown dtype {dtype!r}: bfloat16, float16 or float32")
    if isinstance(source, dict):
        return _hugging_face(source, "the config", global_batch, sequence_length, precision)
    if ":" in source and not Path(source).exists():
        module, function = source.split(":", 1)
        sys.path.insert(0, str(Path.cwd()))
        try:
            factory = getattr(importlib.import_module(module), function)
        except Exception as error:
            raise InputError(f"{source}: {type(error).__name__}: {error}; write module:function, the module importable "
                             "from here") from error
        try:
            with torch.device("meta"):
                made = factory(global_batch, sequence_length)
        except Exception as error:
            raise InputError(f"{source}({global_batch}, {sequence_length}) raised {type(error).__name__}: {error}; it "
                             "is called with the batch and the sequence length, and tensors are made on the meta device"
                             ) from error
        if not isinstance(made, tuple) or len(made) != 3:
            raise InputError(f"{source} returned {shown(made)}: return (model, args, kwargs)")
        return made
    try:
        data = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the config file {source}: {error}") from error
    return _hugging_face(data, source, global_batch, sequence_length, precision)


def _hugging_face(
    data: Any, origin: str, batch: int, sequence: int, dtype: Any
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import torch

    try:
        import transformers
    except ImportError as error:
        raise InputError("a Hugging Face config needs transformers: pip install 'autoparallel[models]'") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError(f"{origin} has no model_type: a Hugging Face config.json is required")
    if data["model_type"] not in transformers.CONFIG_MAPPING:
        close = difflib.get_close_matches(data["model_type"], list(transformers.CONFIG_MAPPING.keys()))
        raise InputError(f"{origin}: transformers {transformers.__version__} has no model_type {data['model_type']!r}"
                         + (f"; is it one of {close}?" if close else ": write module:function that makes the model"))
    named = data.get("architectures") or [None]
    if not isinstance(named, list) or not isinstance(named[0], str | None):
        raise InputError(f"{origin}: architectures is {shown(named)}: give a list with a class of transformers by name")
    architecture = named[0]
    try:
        config = transformers.AutoConfig.for_model(**{k: v for k, v in data.items() if k != "architectures"})
        config.use_cache = False
        with torch.device("meta"):
            if architecture is not None:
                network = getattr(transformers, architecture)(config)
            else:
                network = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(f"{origin}: transformers cannot make {architecture or 'a causal language model'} of it: "
                         f"{type(error).__name__}: {error}") from error
    with torch.device("meta"):
        network = network.to(dtype).train()
        if network.main_input_name == "pixel_values":
            size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
            if not isinstance(size, int) or not isinstance(channels, int):
                raise InputError(f"{origin} says no size of images (image_size is {shown(size)}, num_channels "
                                 f"{shown(channels)}): give both as numbers, or write module:function")
            images = torch.empty(batch, channels, size, size, dtype=dtype)
            return network, (), {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.long)}
        tokens = {k: torch.zeros(batch, sequence, dtype=torch.long) for k in ("input_ids", "labels")}
    return network, (), tokens


def _check_output(path: Path | None) -> None:
    """Raises InputError for a file that cannot be written, before the work of which it tells."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise InputError(f"--output {path} cannot be written: give a file in a folder that is there")


def _mesh_shape(text: str | None) -> tuple[int, ...] | None:
    return _sizes(text, "the mesh", "x", "8x8")


def _sizes(text: str | None, what: str, between: str, example: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split(between)
    if not all(p.isdigit() and int(p) > 0 for p in parts):
        raise InputError(f"cannot read {what} {text!r}: write sizes with {between} between them, for example {example}")
    return tuple(int(p) for p in parts)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    number = text.rstrip("BbIiKkMmGgTt ")
    unit = text[len(number):].strip().upper()
    try:
        return float(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise InputError(f"cannot read the memory limit {text!r}: write for example 70GiB") from None


def main() -> None:
    """Entry point: errors of our own tree are printed without a traceback."""
    try:
        app()
    except AutoparallelError as error:
        typer.secho(f"error: {printable(str(error))}", fg="red", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
