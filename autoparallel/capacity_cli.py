"""Commands on how many devices a job takes: ``size``, ``fit`` and ``goodput``. Torch is imported when
a model is planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from autoparallel.fitting import Fit
    from autoparallel.sizing import Size

#: Minutes between checkpoints, beside the best, in the table of ``goodput``.
INTERVALS_MIN = (5.0, 15.0, 60.0)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (size, fit, goodput):
        app.command()(command)


def size(
    model: Annotated[str, typer.Argument(help="a Hugging Face config file (JSON), or module:function")],
    cluster: Annotated[list[str], typer.Option(help="a cluster's name, or a TOML file; may be given several times")],
    step_time: Annotated[float | None, typer.Option(help="longest step, in seconds")] = None,
    tokens: Annotated[float | None, typer.Option(help="tokens of the whole run, as 15e12")] = None,
    days: Annotated[float | None, typer.Option(help="longest run, without interruptions")] = None,
    budget: Annotated[float | None, typer.Option(help="most that the run may cost, in the clusters' currency")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences per step; 2 for each device by "
                                                     "default")] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 2048,
    most: Annotated[int, typer.Option(min=1, help="largest number of devices to try")] = 4096,
    software: Annotated[str | None, typer.Option(help="whose speed counts: torch-eager, megatron-core, ...")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    optimizer: Annotated[str, typer.Option(help="whose state is counted: adamw, sgd, ...")] = "adamw",
    time_limit: Annotated[float, typer.Option(help="seconds of the search for each number of devices")] = 10.0,
) -> None:
    """Say how many devices train a model in a given time, or at a given price; exit code 1 if none tried do.

    autoparallel size llama3-8b.json --cluster h100-sxm --tokens 15e12 --days 30
    """
    import math

    import autoparallel
    from autoparallel.errors import printable
    from autoparallel.models import load_model
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import seconds_str
    from autoparallel.sizing import print_sizing

    def made(devices: int) -> Any:
        return load_model(model, global_batch or 2 * devices, sequence_length, dtype)

    def tell(one: Size) -> None:
        said = one.refused if one.plan is None else f"{seconds_str(one.step_s)} a step"
        typer.echo(printable(f"{one.devices} devices of {one.cluster.name}: {said}"), err=True)

    found = autoparallel.size(
        made, cluster, step_s=math.inf if step_time is None else step_time, count=tokens or 0.0,
        days=math.inf if days is None else days, budget=math.inf if budget is None else budget, most=most,
        software=software, time_limit_s=time_limit, told=tell, optimizer=optimizer)
    print_sizing(found, ReportConsole())
    raise typer.Exit(0 if found.best is not None else 1)


def fit(
    model: Annotated[str, typer.Argument(help="a Hugging Face config file (JSON), or module:function")],
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")],
    devices: Annotated[int | None, typer.Option(min=1, help="of the cluster; as its description says by "
                                                "default")] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 2048,
    most: Annotated[int, typer.Option(min=1, help="sequences of the largest batch to try")] = 4096,
    offload: Annotated[str, typer.Option(help="tiers to try")] = "none,host,parameters,disk",
    memory_limit: Annotated[str | None, typer.Option(help="of each device, for example 70GiB")] = None,
    host_memory_limit: Annotated[str | None, typer.Option(help="of host memory per device, for example 200GiB")] = None,
    software: Annotated[str | None, typer.Option(help="whose speed counts: torch-eager, megatron-core, ...")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    optimizer: Annotated[str, typer.Option(help="whose state is counted: adamw, sgd, ...")] = "adamw",
    time_limit: Annotated[float, typer.Option(help="seconds of the search for each batch")] = 10.0,
) -> None:
    """Say whether training fits on so many devices, with what on the host or disk, and how large a batch; exit code 1
    if nothing fits.

    autoparallel fit llama3-70b.json --cluster a100-sxm --devices 1
    """
    import autoparallel
    from autoparallel.errors import printable
    from autoparallel.fitting import print_fitting
    from autoparallel.models import load_model
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import bytes_of

    def tell(one: Fit) -> None:
        said = one.refused if one.plan is None else f"a batch of {one.batch} fits"
        typer.echo(printable(f"offload {one.offload}: {said}"), err=True)

    limits: dict[str, Any] = {name: bytes_of(text) for name, text in (("memory_limit_bytes", memory_limit), (
        "host_memory_limit_bytes", host_memory_limit)) if text is not None}
    found = autoparallel.fit(
        lambda batch: load_model(model, batch, sequence_length, dtype), cluster, devices=devices, most=most,
        tiers=[tier.strip() for tier in offload.split(",")], software=software, time_limit_s=time_limit, told=tell,
        optimizer=optimizer, **limits)
    print_fitting(found, ReportConsole())
    raise typer.Exit(0 if found.fits else 1)


def goodput(
    devices: Annotated[int | None, typer.Option(min=1, help="of the job; those of --plan by default")] = None,
    plan: Annotated[Path | None, typer.Option(help="a saved plan, whose steps per day are said too")] = None,
    hours_between_failures: Annotated[float | None, typer.Option(
        help="of one device; by default those of Llama 3's training, 50,740")] = None,
    restart: Annotated[float, typer.Option(min=0, help="seconds from a failure until the job trains again")] = 300.0,
    checkpoint: Annotated[float, typer.Option(min=0, help="seconds in which a checkpoint holds training up")] = 10.0,
    repair: Annotated[float, typer.Option(min=0, help="hours until a broken host is back")] = 24.0,
    spares: Annotated[str, typer.Option(help="numbers of spare hosts, to compare")] = "0,1,2,4,8,16,32",
) -> None:
    """Say what share of its time a job trains, by the interval of checkpoints and the number of spare hosts."""
    import math

    from rich.table import Table

    from autoparallel.errors import InputError
    from autoparallel.plans import Plan
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import duration_str, percent_str, seconds_str
    from cost_models.goodput import HOUR_S, LLAMA3_PER_DEVICE_HOUR, Failures

    saved = None if plan is None else Plan.load(plan)
    if devices is None and saved is None:
        raise InputError("goodput is of a number of devices: give --devices, or --plan")
    count = devices or math.prod(saved.axes[0])  # type: ignore[union-attr]
    try:
        numbers = sorted({int(number) for number in spares.split(",")})
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise InputError(f"--spares is {spares!r}: give numbers of hosts, as 0,4,16")
    if hours_between_failures is not None and not hours_between_failures > 0:
        raise InputError(f"--hours-between-failures is {hours_between_failures:g}: give hours above 0")
    rate = LLAMA3_PER_DEVICE_HOUR if hours_between_failures is None else 1 / hours_between_failures
    failures = Failures(rate, restart, checkpoint, repair * HOUR_S)
    best_s, console = failures.best_interval_s(count), ReportConsole()
    shares = {spare: failures.goodput(count, best_s, spare) for spare in numbers}
    most = max(shares.values())
    enough = next(spare for spare, share in shares.items() if share > most - 0.005)
    console.print(f"{count} devices fail every {duration_str(1 / failures.per_s(count))}: with checkpoints every "
                  f"{duration_str(best_s)} of training and {enough} spare hosts the job trains "
                  f"{percent_str(shares[enough])} of its time.")
    if saved is not None:
        console.print(f"That is {shares[enough] * 24 * HOUR_S / saved.prediction.step_s:,.0f} steps of "
                      f"{seconds_str(saved.prediction.step_s)} a day.")
    table = Table("spare hosts", "hosts enough", f"every {duration_str(best_s)}",
                  *(f"every {minutes:g} min" for minutes in INTERVALS_MIN), box=None, pad_edge=False)
    for spare in numbers:
        table.add_row(str(spare), percent_str(failures.available(count, spare)), percent_str(shares[spare]),
                      *(percent_str(failures.goodput(count, 60 * minutes, spare)) for minutes in INTERVALS_MIN))
    console.print(table)


__all__ = ["add_to", "fit", "goodput", "size"]
