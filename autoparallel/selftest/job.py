"""Runs the checks on local processes, or on those that a launcher started, and writes JSON and a page."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autoparallel.backends import chosen
from autoparallel.errors import AutoparallelError, InputError
from autoparallel.selftest.checks import Check, equality, failure, prediction, race
from autoparallel.selftest.subjects import SUBJECTS
from cost_models.files import write_whole

#: The share of the time that all equality checks may take, each model an equal part of what is left of it.
EQUALITY_SHARE = 0.7


@dataclass(frozen=True)
class Request:
    """``ranks``: local processes, where no launcher started any. ``models``: names of `SUBJECTS`. ``backends``: of
    `autoparallel.compile`. ``rounds``: steps of each variant of a race. ``device``: of `autoparallel.launch.local`."""

    ranks: int
    minutes: float
    models: tuple[str, ...] = tuple(SUBJECTS)
    backends: tuple[str, ...] = ("eager",)
    rounds: int = 20
    device: str | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.models if name not in SUBJECTS]:
            raise InputError(f"unknown model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
        for name in self.backends:
            chosen(name, "cuda" if torch.cuda.device_count() and self.device != "cpu" else "cpu")
        if self.ranks < 2:
            raise InputError(f"--ranks {self.ranks}: communication needs at least two processes")
        if self.device not in (None, "cpu", "cuda") or (self.device == "cuda" and not torch.cuda.device_count()):
            raise InputError(f"--device {self.device}: cpu, or cuda where torch finds a GPU, is required")
        if not self.minutes > 0:
            raise InputError(f"--minutes {self.minutes}: give a positive number")


def main(request: Request, output: Path | None) -> bool:
    """Run, print the page, and write ``output`` (.json) and the page beside it (.md) as parts end. Whether no check
    failed."""
    under_launcher = "WORLD_SIZE" in os.environ
    if under_launcher:
        import autoparallel

        if request.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""              # as `launch` has it for local ranks
        autoparallel.init(device=request.device)
    checks = _run(request, _here if under_launcher else _on_local_ranks(request.ranks, request.device),
                  partial(_write, request, output))
    if int(os.environ.get("RANK", 0)) == 0:
        print(as_page(checks, environment(request)))
    return all(check.status != "failed" for check in checks)


def _write(request: Request, output: Path | None, checks: Sequence[Check]) -> None:
    """Write what is known, so that a run that is ended early leaves it."""
    if output is not None:
        about = environment(request)
        found = {"format": 1, "environment": about, "checks": [asdict(check) for check in checks]}
        write_whole(output.with_suffix(".json"), json.dumps(found, indent=1) + "\n")
        write_whole(output.with_suffix(".md"), as_page(checks, about) + "\n")


Part = Callable[..., list[Check]]


def _run(request: Request, run: Callable[..., list[Check]], told: Callable[[Sequence[Check]], None]) -> list[Check]:
    """All parts in turn, ``told`` as they end. The failure of a rank comes last, since it ends the process groups."""
    ends, checks = time.monotonic() + 60 * request.minutes, list[Check]()

    def add(found: Sequence[Check]) -> None:
        checks.extend(found)
        counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(c.status for c in found).items()))
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"{found[0].part} of {found[0].name.split(',')[0]}: {counts}", file=sys.stderr, flush=True)
            for check in found:
                if check.status == "failed":
                    print(f"  {check.name}: {check.text}", file=sys.stderr, flush=True)
            told(checks)

    models_end = ends - (1 - EQUALITY_SHARE) * 60 * request.minutes
    for number, name in enumerate(request.models):
        if SUBJECTS[name].is_there:
            share = (models_end - time.monotonic()) / (len(request.models) - number)
            add(run(equality, name, request.backends, max(0.0, share)))
        else:
            add([Check("equality", name, "skipped", f"{SUBJECTS[name].needs} is not installed", {}, 0.0)])
    if SUBJECTS["llama"].is_there:
        add(run(race, request.rounds, max(0.0, ends - time.monotonic())))
        add(run(prediction, max(0.0, ends - time.monotonic())))
    add(run(failure))
    return checks


def _here(part: Part, *args: Any) -> list[Check]:
    return part(*args)


def _on_local_ranks(ranks: int, device: str | None) -> Callable[..., list[Check]]:
    """Each part in processes of its own: what breaks one leaves the others alone."""
    from autoparallel.launch.local import launch

    def run(part: Part, *args: Any) -> list[Check]:
        if part is not failure and not args[-1]:    # no processes are started for nothing
            name = args[0] if part is equality else "all"
            return [Check(part.__name__, name, "skipped", "no time left", {}, 0.0)]
        try:
            found: list[list[Check]] = launch(part, ranks, *args, device=device)
        except Exception as error:  # a rank's exception, with its traceback
            text = _end_of(str(error)) if not isinstance(error, AutoparallelError) else str(error)
            return [Check(part.__name__, " ".join(map(str, args[:1])) or part.__name__, "failed", text, {}, 0.0)]
        return [_worst(checks) for checks in zip(*found, strict=True)]

    return run


def _end_of(traceback: str) -> str:
    """The error that a rank's traceback ends with, and the notes after it.

    >>> _end_of('  File "a.py", line 1, in f\\n    g()\\nRuntimeError: gloo cannot\\n  do that\\nin the check llama')
    'RuntimeError: gloo cannot\\n  do that\\nin the check llama'
    """
    _, found, last = traceback.rstrip().rpartition('  File "')
    if not found:
        return last
    frames = last.splitlines()
    first = next((number for number, line in enumerate(frames) if number and not line.startswith(" ")), 0)
    return "\n".join(frames[first:])


def _worst(checks: Sequence[Check]) -> Check:
    """The finding of one check over all ranks: one that failed, else the first rank's."""
    return next((check for check in checks if check.status == "failed"), checks[0])


def environment(request: Request) -> dict[str, Any]:
    """Versions and machine, as the page and the JSON tell them."""
    import autoparallel

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"date": datetime.date.today().isoformat(), "autoparallel": autoparallel.__version__,
            "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
            "cores": os.cpu_count(), "gpus": gpus, "load": list(os.getloadavg()),
            "ranks": int(os.environ.get("WORLD_SIZE", request.ranks)), "backends": list(request.backends),
            "minutes": request.minutes}


def as_page(checks: Sequence[Check], about: dict[str, Any]) -> str:
    """One page in Markdown: the conditions, a count, what failed, then every check."""
    counted = Counter(check.status for check in checks)
    lines = ["# autoparallel selftest", "",
             *(f"- {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
               for name, value in about.items() if value not in ([], None)), "",
             f"**{', '.join(f'{count} {status}' for status, count in sorted(counted.items()))}**", ""]
    for status in ("failed", "measured", "refused", "passed", "skipped"):
        rows = [check for check in checks if check.status == status]
        if rows:
            lines += [f"## {status.capitalize()}", "", "| part | check | result | seconds |", "|---|---|---|---|"]
            lines += [f"| {c.part} | {c.name} | {_cell(c.text)} | {c.seconds:.1f} |" for c in rows] + [""]
    return "\n".join(lines).rstrip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]


__all__ = ["Request", "as_page", "main"]
