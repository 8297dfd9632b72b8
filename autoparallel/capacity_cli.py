"""Commands on how many devices a job takes, or has left, and on which plan pays where: ``size``, ``fit``, ``goodput``,
``replan`` and ``study``. Torch is imported when a model is planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoparallel.plan_cli import Dtype, MemoryLimit, Model, Optimizer, SequenceLength, Software
from autoparallel.schedule.tiers import FITTED, PLACES, places_in

if TYPE_CHECKING:
    from autoparallel.fitting import Fit
    from autoparallel.plans import Plan
    from autoparallel.regions import Point
    from autoparallel.replanning import Candidate
    from autoparallel.sizing import Size
    from cost_models import Cluster

#: Minutes between checkpoints, beside the best, in the table of ``goodput``.
INTERVALS_MIN = (5.0, 15.0, 60.0)


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (size, fit, goodput, replan, study):
        app.command()(command)


def size(
    model: Model,
    cluster: Annotated[list[str], typer.Option(help="a cluster's name, or a TOML file; may be given several times")],
    step_time: Annotated[float | None, typer.Option(help="longest step, in seconds")] = None,
    tokens: Annotated[float | None, typer.Option(help="tokens of the whole run, as 15e12")] = None,
    days: Annotated[float | None, typer.Option(help="longest run, without interruptions")] = None,
    budget: Annotated[float | None, typer.Option(help="most that the run may cost, in the clusters' currency")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="sequences per step; 2 for each device by "
                                                     "default")] = None,
    sequence_length: SequenceLength = None,
    most: Annotated[int, typer.Option(min=1, help="largest number of devices to try")] = 4096,
    software: Software = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    time_limit: Annotated[float, typer.Option(min=0, help="seconds of the search for each number of devices")] = 10.0,
) -> None:
    """Say how many devices train a model in a given time, and for at most a given price; exit code 3 if none tried do.

    autoparallel size llama3-8b.json --cluster h100-sxm --tokens 15e12 --days 30
    """
    import math

    import autoparallel
    from autoparallel.errors import printable
    from autoparallel.models import dtype_on, load_model
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import seconds_str
    from autoparallel.sizing import print_sizing

    _check_asked(step_time, tokens, days, budget)
    precision = dtype_on([autoparallel.Cluster.load(name) for name in cluster], model, dtype)

    def made(devices: int) -> Any:
        return load_model(model, global_batch or 2 * devices, sequence_length, precision)

    def tell(one: Size) -> None:
        said = one.refused if one.plan is None else f"{seconds_str(one.step_s)} a step"
        typer.echo(printable(f"{one.devices} device{'s' * (one.devices != 1)} of {one.cluster.name}: {said}"), err=True)

    found = autoparallel.size(
        made, cluster, step_s=math.inf if step_time is None else step_time, count=tokens or 0.0,
        days=math.inf if days is None else days, budget=math.inf if budget is None else budget, most=most,
        software=software, time_limit_s=time_limit, told=tell, optimizer=optimizer)
    print_sizing(found, ReportConsole())
    raise typer.Exit(0 if found.best is not None else 3)


def _check_asked(step_time: float | None, tokens: float | None, days: float | None, budget: float | None) -> None:
    """Raises InputError, in the command's options, for what `autoparallel.size` would refuse in its own."""
    from autoparallel.errors import InputError

    for option, value in (("--step-time", step_time), ("--days", days), ("--budget", budget)):
        if value is not None and not value > 0:
            raise InputError(f"{option} is {value:g}: give a number above 0")
    if tokens is not None and not 0 < tokens < float("inf"):
        raise InputError(f"--tokens is {tokens:g}: give the number of tokens of the whole run, above 0")
    if step_time is None and days is None:
        raise InputError("nothing is asked of the devices: give --step-time, or --tokens and --days; --budget limits "
                         "what these may cost")
    if tokens is None and (days is not None or budget is not None):
        raise InputError("--days and --budget are of a whole run: give the number of its tokens as --tokens")


def fit(
    model: Model,
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")],
    devices: Annotated[int | None, typer.Option(min=1, help="of the cluster; as its description says by "
                                                "default")] = None,
    sequence_length: SequenceLength = None,
    most: Annotated[int, typer.Option(min=1, help="sequences of the largest batch to try")] = 4096,
    offload: Annotated[str, typer.Option(help="tiers to try; those by names, 'embed*=disk,layers.0.*=host', are "
                                            "one")] = ",".join(FITTED),
    memory_limit: MemoryLimit = None,
    host_memory_limit: Annotated[str | None, typer.Option(help="of host memory per device, for example 200GiB")] = None,
    software: Software = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    time_limit: Annotated[float, typer.Option(min=0, help="seconds of the search for each batch")] = 10.0,
) -> None:
    """Say whether training fits on so many devices, with what on the host or disk, and how large a batch at a time;
    exit code 3 if nothing fits.

    autoparallel fit llama3-70b.json --cluster a100-sxm --devices 1
    """
    import autoparallel
    from autoparallel.errors import InputError, printable
    from autoparallel.fitting import print_fitting, tier_text
    from autoparallel.models import dtype_on, load_model
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import bytes_of

    def tell(one: Fit) -> None:
        said = one.refused if one.plan is None else f"a batch of {one.batch} fits"
        typer.echo(printable(f"offload {tier_text(one.offload)}: {said}"), err=True)

    tiers = places_in(offload)
    if unknown := [tier for tier in tiers if isinstance(tier, str) and tier not in PLACES]:
        raise InputError(f"--offload has {unknown[0]!r}: give some of {', '.join(PLACES)}, with commas between them")
    limits: dict[str, Any] = {name: bytes_of(text, option) for name, option, text in (
        ("memory_limit_bytes", "--memory-limit", memory_limit),
        ("host_memory_limit_bytes", "--host-memory-limit", host_memory_limit)) if text is not None}
    precision = dtype_on([autoparallel.Cluster.load(cluster)], model, dtype)
    found = autoparallel.fit(
        lambda batch: load_model(model, batch, sequence_length, precision), cluster, devices=devices, most=most,
        tiers=tiers, software=software, time_limit_s=time_limit, told=tell,
        optimizer=optimizer, **limits)
    print_fitting(found, ReportConsole())
    raise typer.Exit(0 if found.fits else 3)


def study(
    model: Model,
    cluster: Annotated[str, typer.Option(help="a cluster's name, or a TOML file")],
    sequence_lengths: Annotated[str, typer.Option(help="tokens per sequence, as 8k,32k,128k")] = "4k,32k,128k",
    global_batches: Annotated[str, typer.Option(help="sequences per step, as 64,512")] = "64",
    devices: Annotated[str, typer.Option(help="numbers of devices, as 8,64,512")] = "8,64",
    refine: Annotated[int, typer.Option(min=0, max=8, help="how often intervals of lengths are halved where another "
                                        "kind of plan is the fastest")] = 1,
    joint: Annotated[bool, typer.Option("--joint", help="ask the joint search, too")] = False,
    time_limit: Annotated[float | None, typer.Option(min=0, help="seconds of that search at each point; 10 by default")
                          ] = None,
    software: Software = None,
    dtype: Dtype = None,
    optimizer: Optimizer = "adamw",
    svg: Annotated[Path | None, typer.Option(help="write the picture of the regions here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the points as JSON (docs/report_schema.md)")] = False,
) -> None:
    """Say which kind of plan is the fastest by sequence length, batch and number of devices, and from where on; exit
    code 3 if there is no plan anywhere.

    autoparallel study llama3-8b.json --cluster h100-sxm --sequence-lengths 8k,64k,256k --devices 64
    """
    import autoparallel
    from autoparallel.errors import InputError, printable
    from autoparallel.models import dtype_on, load_model
    from autoparallel.plan_cli import check_output
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import seconds_str
    from autoparallel.region_reports import print_regions, to_json, to_svg

    def tell(one: Point) -> None:
        best = one.best
        said = f"no plan, {one.refused}" if best is None else f"{best.kind}, {seconds_str(best.step_s)} a step"
        typer.echo(printable(f"{one.devices} devices, batch {one.batch}, {one.sequence} tokens: {said}"), err=True)

    check_output(svg, "--svg")
    if time_limit is not None and not joint:
        raise InputError(f"--time-limit {time_limit:g} is of the joint search: give --joint, or leave it out")
    lengths, batches, counts = (_list_of(text, option) for text, option in (
        (sequence_lengths, "--sequence-lengths"), (global_batches, "--global-batches"), (devices, "--devices")))
    precision = dtype_on([autoparallel.Cluster.load(cluster)], model, dtype)
    found = autoparallel.study(
        lambda batch, length: load_model(model, batch, length, precision), cluster, sequences=lengths, batches=batches,
        devices=counts, refine=refine, joint=joint, time_limit_s=10.0 if time_limit is None else time_limit,
        software=software, optimizer=optimizer, told=tell)
    if svg is not None:
        svg.write_text(to_svg(found), encoding="utf-8")
    if as_json:
        typer.echo(to_json(found))
    else:
        print_regions(found, ReportConsole())
    raise typer.Exit(0 if found.kinds else 3)


def _list_of(text: str, option: str) -> list[int]:
    """Whole numbers of a list, where 8k is 8,192. Raises InputError."""
    from autoparallel.errors import InputError

    found = list[int]()
    for part in (one.strip().lower() for one in text.split(",")):
        number = part.removesuffix("k")
        if not number.isdecimal() or not int(number):
            raise InputError(f"{option} is {text!r}: give whole numbers above 0, as 8,64 (8k is 8,192)")
        found.append(int(number) * (1024 if part != number else 1))
    return found


def goodput(
    devices: Annotated[int | None, typer.Option(min=1, help="devices of the job; those of --plan by default")] = None,
    plan: Annotated[Path | None, typer.Option(help="a saved plan, whose steps per day are said too")] = None,
    hours_between_failures: Annotated[float | None, typer.Option(
        help="mean hours between failures of one device; by default 50,740, as in Llama 3's training")] = None,
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
    from autoparallel.plans.reports.units import below_all_str, duration_str, seconds_str
    from cost_models.goodput import HOUR_S, LLAMA3_PER_DEVICE_HOUR, Failures

    saved = None if plan is None else Plan.load(plan)
    if devices is None and saved is None:
        raise InputError("goodput is of a number of devices: give --devices, or --plan")
    of_plan = devices if saved is None else math.prod(saved.axes[0])
    if devices is not None and devices != of_plan:
        raise InputError(f"--devices is {devices}, and the steps of --plan {plan} are those of {of_plan} devices: "
                         "leave one of them out")
    count = of_plan or 1
    try:
        numbers = sorted({int(number) for number in spares.split(",")})
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise InputError(f"--spares is {spares!r}: give numbers of hosts, as 0,4,16")
    if hours_between_failures is not None and not 0 < hours_between_failures < math.inf:
        raise InputError(f"--hours-between-failures is {hours_between_failures:g}: give hours above 0")
    for option, value in (("--restart", restart), ("--checkpoint", checkpoint), ("--repair", repair)):
        if not math.isfinite(value):
            raise InputError(f"{option} is {value:g}: give a number, 0 or more")
    rate = LLAMA3_PER_DEVICE_HOUR if hours_between_failures is None else 1 / hours_between_failures
    failures = Failures(rate, restart, checkpoint, repair * HOUR_S)
    best_s, console = failures.best_interval_s(count), ReportConsole()
    shares = {spare: failures.goodput(count, best_s, spare) for spare in numbers}
    most = max(shares.values())
    enough = next(spare for spare, share in shares.items() if share > most - 0.005)
    who = "1 device fails" if count == 1 else f"{count} devices fail"
    console.print(f"{who} every {duration_str(1 / failures.per_s(count))}: with checkpoints every "
                  f"{duration_str(best_s)} of training and {enough} spare host{'s' * (enough != 1)} the job trains "
                  f"{below_all_str(shares[enough])} of its time.")
    if saved is not None:
        console.print(f"That is {shares[enough] * 24 * HOUR_S / saved.prediction.step_s:,.0f} steps of "
                      f"{seconds_str(saved.prediction.step_s)} a day.")
    table = Table("spare hosts", "hosts enough", f"every {duration_str(best_s)}",
                  *(f"every {minutes:g} min" for minutes in INTERVALS_MIN), box=None, pad_edge=False)
    for spare in numbers:
        table.add_row(str(spare), below_all_str(failures.available(count, spare)), below_all_str(shares[spare]),
                      *(below_all_str(failures.goodput(count, 60 * minutes, spare)) for minutes in INTERVALS_MIN))
    console.print(table)


def replan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="the plan by which the job ran")],
    model: Annotated[str, typer.Argument(help="the plan's model, as for autoparallel plan")],
    cluster: Annotated[str | None, typer.Option(help="the cluster now; the plan's by default. Give it again if it was "
                                                "a TOML file")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="devices that there are now")] = None,
    lost_hosts: Annotated[int, typer.Option(min=0, help="how many hosts are gone, with all their devices")] = 0,
    lost: Annotated[str | None, typer.Option(help="numbers of the lost hosts, as 0,5; by default the last "
                                             "ones")] = None,
    from_checkpoint: Annotated[bool, typer.Option("--from-checkpoint", help="all processes start again, and read a "
                                                  "checkpoint")] = False,
    horizon_steps: Annotated[float | None, typer.Option(help="steps until the next change; by default those between "
                                                        "two failures of so many devices")] = None,
    time_limit: Annotated[float, typer.Option(min=0, help="seconds of the search")] = 10.0,
    all_devices: Annotated[bool, typer.Option("--all-devices", help="only plans that leave no device idle")] = False,
    output: Annotated[Path | None, typer.Option(help="write the new plan here as JSON")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the candidates as JSON (docs/report_schema.md)")] = False,
) -> None:
    """Say how a job goes on after hosts were lost or gained: the plan with the least total of moving its state and of
    the steps to come.

    autoparallel replan plan.json llama3-8b.json --lost-hosts 1 --output new.json
    """
    import autoparallel
    from autoparallel.errors import printable
    from autoparallel.models import load_planned
    from autoparallel.plan_cli import check_output
    from autoparallel.plans.reports.text import ReportConsole
    from autoparallel.plans.reports.units import seconds_str
    from autoparallel.replanning import print_replan

    def tell(one: Candidate) -> None:
        said = one.refused if one.plan is None else f"{seconds_str(one.step_s)} a step"
        typer.echo(printable(f"{one.title}, {one.devices} devices: {said}"), err=True)

    check_output(output)
    before = autoparallel.Plan.load(plan)
    machine, gone = _left(before, cluster, devices, lost_hosts, lost)
    network, args, kwargs = load_planned(model, before.model.inputs, before.model.dtype)
    found = autoparallel.replan(
        before, machine, network, example_inputs=args, example_kwargs=kwargs, lost=gone,
        source="checkpoint" if from_checkpoint else "peers", horizon_steps=horizon_steps, time_limit_s=time_limit,
        all_devices=all_devices, told=tell)
    if output is not None:
        found.plan.save(output)
    if as_json:
        typer.echo(found.to_json())
    else:
        print_replan(found, ReportConsole())


def _left(plan: Plan, cluster: str | None, devices: int | None, lost_hosts: int, lost: str | None
          ) -> tuple[Cluster, list[int] | None]:
    """The cluster that is left, and the numbers of the lost devices (None: the last). Raises InputError for hosts that
    the plan has not."""
    import math

    from autoparallel.errors import InputError
    from autoparallel.plan_cli import cluster_of, tell_figures

    tell_figures(plan, cluster)
    before = math.prod(plan.axes[0])
    machine = cluster_of(plan, cluster, before)
    each = min(machine.devices_per_host, before)
    hosts = -(-before // each)
    try:
        numbers = sorted({int(number) for number in lost.split(",")}) if lost is not None else list(
            range(hosts - lost_hosts, hosts))
    except ValueError:
        numbers = [-1]
    if any(not 0 <= number < hosts for number in numbers) or (lost_hosts and len(numbers) != lost_hosts):
        given = " and ".join([*([f"--lost-hosts {lost_hosts}"] if lost_hosts else []),
                              *([f"--lost {lost}"] if lost is not None else [])])
        numbered = f"numbered from 0 to {hosts - 1}" if hosts > 1 else "number 0"
        raise InputError(f"{given}: the plan has {hosts} host{'s' * (hosts != 1)} of {each} devices, {numbered}; give "
                         "numbers of these, as many as --lost-hosts says")
    gone = [device for number in numbers for device in range(number * each, min(before, (number + 1) * each))]
    count = devices if devices is not None else before - len(gone)
    if count < 1:
        raise InputError(f"no device is left of {before}: give --devices, or fewer --lost-hosts")
    return cluster_of(plan, cluster, count), gone or None


__all__ = ["add_to", "fit", "goodput", "replan", "size", "study"]
