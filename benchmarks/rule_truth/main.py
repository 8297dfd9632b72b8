"""The command: ops of torch's database studied one after the other in a process that may die, figures at the end."""

from __future__ import annotations

import json
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autoparallel.errors import AutoparallelError
from benchmarks.measure import conditions
from benchmarks.rule_truth import dtensor, report
from benchmarks.rule_truth.kept import Kept
from benchmarks.rule_truth.study import OpStudy, Study

SEED = 0


def database(names: Sequence[str] = ()) -> list[Any]:
    """Torch's op database, or the ops of these names. Raises AutoparallelError for a name that it does not have."""
    from torch.testing._internal.common_methods_invocations import op_db

    unknown = set(names) - {info.name for info in op_db}
    if unknown:
        raise AutoparallelError(f"torch's op database has no {', '.join(sorted(unknown))}: write names as it does, "
                                "such as add, linalg.solve or nn.functional.linear")
    return [info for info in op_db if not names or info.name in names]


def studied(infos: Sequence[Any], sizes: tuple[int, ...], num_samples: int, kept: Kept | None) -> Iterator[OpStudy]:
    """Each op, in a process of its own kind: shards that do not fit each other make some of torch's kernels crash.

    A crash may be of an op before it, so that an op is tried a second time; then only what is claimed is tried. What
    was ``kept`` is not done again.
    """
    worker = _Worker(infos, sizes, num_samples)
    try:
        for number, info in enumerate(infos):
            study = kept.read(info.formatted_name) if kept is not None else None
            if study is None:
                study = _made(worker, number, info.formatted_name)
                if kept is not None:
                    kept.write(study)
            yield study
    finally:
        worker.stop()


def _made(worker: _Worker, number: int, name: str) -> OpStudy:
    for search in (True, True, False):
        study = worker.ask(number, search)
        if study is not None:
            return study
    return OpStudy(name, left_out=Counter({"torch crashes": 1}))


def sliced(infos: Sequence[Any], part: str) -> list[Any]:
    """``"2/4"``: every fourth, from the second on. Raises AutoparallelError for what is no such part."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise AutoparallelError(f"--slice {part} is no part of a whole: write 1/4, 2/4, 3/4 or 4/4, for example")
    return list(infos[int(match[1]) - 1 :: int(match[2])])


class _Worker:
    """A process that studies ops, started anew when it dies."""

    def __init__(self, infos: Sequence[Any], sizes: tuple[int, ...], num_samples: int) -> None:
        self.settings = infos, sizes, num_samples
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *self.settings), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, number: int, search: bool) -> OpStudy | None:
        """None when the process died over it."""
        try:
            self.pipe.send((number, search))
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.pipe.close()
            self.process.join()
            self._start()
            return None

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join()


def _work(pipe: Connection, infos: Sequence[Any], sizes: tuple[int, ...], num_samples: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with dtensor.meshes(sizes) as meshes:
        study = Study(sizes, num_samples, SEED, lambda case, asked, size: dtensor.claimed(case, asked, meshes[size]),
                      lambda case, combination, size: dtensor.kept(case, combination, meshes[size]))
        while (question := pipe.recv()) is not None:
            number, study.search = question
            pipe.send(study.of(infos[number]))


def ops_of_models() -> set[str]:
    """The ops of the normal form that occur in the architectures."""
    import transformers

    from autoparallel.capture import capture
    from benchmarks.architectures import ARCHITECTURES
    from benchmarks.zoo import build, inputs_of

    transformers.logging.set_verbosity_error()
    return {node.op_name for name in ARCHITECTURES
            for node in capture(build(name), (), inputs_of(name)).of_kind("op")}


def summary(studies: Sequence[OpStudy], of_models: set[str], seconds: float, num_samples: int,
            sizes: tuple[int, ...]) -> dict[str, Any]:
    """Everything as one object; op names are those of the normal form, but for ``database``."""
    judged = report.distinct(studies)
    in_models = [j for j in judged if j.op in of_models]
    return {
        "conditions": conditions(), "seconds": round(seconds), "cpu_seconds": round(sum(s.seconds for s in studies)),
        "seed": SEED, "samples": num_samples, "sizes": sizes,
        "all": report.figures(judged).as_json(),
        "in_models": report.figures(in_models).as_json() if of_models else None,
        "families": {name: f.as_json() for name, f in report.grouped(judged, "family").items()},
        "ops": {name: f.as_json() for name, f in report.grouped(judged, "op").items()},
        "database": {s.name: {**report.figures(s.judged).as_json(), "samples": s.num_samples, "left_out": s.left_out}
                     for s in studies},
        **{what: report.lines_by_op(judged, what) for what in ("wrong", "missed", "dtensor_only", "dtensor_wrong")},
    }


def run(
    ops: Annotated[list[str] | None, typer.Argument(help="names of torch's op database; without, all")] = None,
    samples: Annotated[int, typer.Option(help="of each op and each kind of lengths, chosen by a fixed seed")] = 8,
    sizes: Annotated[str, typer.Option(help="of the axis")] = "2,3",
    output: Annotated[Path | None, typer.Option(help="write the JSON here as well")] = None,
    part: Annotated[str, typer.Option("--slice", help="2/4: every fourth op, from the second on")] = "1/1",
    keep: Annotated[Path | None, typer.Option(
        help="a folder of studies: what it has is not done again, what is done goes there")] = None,
) -> None:
    """Sharding rules held to the ops themselves on shards, beside DTensor's rules and what would be possible.

    Slices that share a folder may run at once; the same command without --slice then sums up.
    """
    from rich.console import Console

    clock = time.perf_counter()
    axis_sizes = tuple(int(size) for size in sizes.split(","))
    infos = sliced(database(ops or ()), part)
    kept = Kept(keep, {"samples": samples, "sizes": list(axis_sizes), "seed": SEED}) if keep is not None else None
    studies = []
    for number, study in enumerate(studied(infos, axis_sizes, samples, kept), 1):
        studies.append(study)
        print(f"[{number}/{len(infos)}] {report.line(study)}", flush=True)
    of_models = set() if ops else ops_of_models()
    made = summary(studies, of_models, time.perf_counter() - clock, samples, axis_sizes)
    judged = report.distinct(studies)
    rows = report.grouped(judged, "family") | {"all": report.figures(judged)}
    if of_models:
        rows["ops of the models"] = report.figures([j for j in judged if j.op in of_models])
    Console(width=180).print(report.table(f"placements on axes of {sizes}", rows))
    for op, lines in made["wrong"].items():
        print(f"WRONG {op}:", *lines, sep="\n    ")
    text = json.dumps(made)
    if output is not None:
        output.write_text(text + "\n", "utf-8")
    print(text)


def main() -> None:
    typer.run(run)
