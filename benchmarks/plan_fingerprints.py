"""Which plans the search finds: ``python -m benchmarks.plan_fingerprints --write FILE``, or ``--compare FILE``.

A change that is not meant to change any plan is compared with the file of before it. The cases are the 46 architectures
of the model zoo (512 sequences of 64 tokens) on (8,) and (8, 8), some networks of `configs/`, in a pipeline and with
memory that binds, and the joint search for Llama-3-8B, all by `autoparallel.plan` for H100s by the prices of their
description alone (without a software profile, whose fitted constants move), with default options but for the limits of
time. A fingerprint has a plan's strategies as a digest and counted by name, how its step runs, its
cost and its memory.

The joint search's memory binds, and its default ends by the clock, with what HiGHS has found until then. So that the
same plan comes out on every machine it has the recursive search here, and time for all its estimates (5 minutes on one
core).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoparallel import Cluster, Plan, plan
from autoparallel.plans import Hybrid

CONFIGS = Path(__file__).parent / "configs"
FILE = Path(__file__).with_suffix(".json")
MESHES = (8,), (8, 8)
ZOO_SIZES = 512, 64
#: Two plans cost the same when their seconds and bytes differ by less than this share.
TOLERANCE = 1e-9
#: So long that the clock ends no search of the cases that need it.
LONG_S = 3600.0

Fingerprint = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An architecture of the model zoo or a config, its global batch and tokens, devices, and options of `plan`."""

    model: str
    sizes: tuple[int, int]
    devices: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The model and the arguments of its call: of the zoo with weights, of a config on the meta device."""
        from autoparallel.models import load_model
        from benchmarks.zoo import build, inputs_of

        if self.model.endswith(".json"):
            return load_model(json.loads((CONFIGS / self.model).read_text()), *self.sizes, "bfloat16")
        return build(self.model), (), inputs_of(self.model, *self.sizes)

    def plan(self) -> Plan:
        model, args, kwargs = self.inputs()
        cluster = Cluster.load("h100-sxm", num_devices=self.devices, software="none")
        return plan(model, cluster, example_inputs=args, example_kwargs=kwargs, **self.options)


def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    from benchmarks.architectures import ARCHITECTURES

    found = {f"{name} {_text(shape)}": Case(name, ZOO_SIZES, math.prod(shape), {"mesh_shape": shape})
             for name in ARCHITECTURES for shape in MESHES}
    pipeline = {"mesh_shape": (4, 2, 8), "pipeline_stages": 4, "micro_batches": 8, "zero_stage": 1, "recompute": "full"}
    return {
        **found,
        "gpt2 config 4": Case("gpt2.json", (16, 1024), 4, {"mesh_shape": (4,)}),
        "llama3-8b 8x8": Case("llama3-8b.json", (16, 8192), 64, {"mesh_shape": (8, 8)}),
        "llama3-8b pipeline 4x2x8": Case("llama3-8b.json", (64, 8192), 64, {**pipeline, "time_limit_s": LONG_S}),
        "llama3-8b joint": Case("llama3-8b.json", (128, 8192), 64,
                                {"joint": True, "search": "recursive", "time_limit_s": LONG_S}),
    }


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def fingerprint(case: Case, found: Plan) -> Fingerprint:
    """What is kept of a case's plan, in JSON's types."""
    named = {name: "·".join(strategy) for name, strategy in found.strategies.items()}
    text = json.dumps(named, sort_keys=True, ensure_ascii=False)
    made = {
        "model": case.model,
        "mesh": found.mesh_shape,
        "strategies": hashlib.sha256(text.encode()).hexdigest()[:16],
        "counted": dict(sorted(Counter(named.values()).items())),
        "hybrid": asdict(found.hybrid),
        "objective_s": found.evidence.objective_s,
        "step_s": found.prediction.step_s,
        "peak_bytes": found.prediction.peak_bytes,
        "stop": found.evidence.stop_reason,
    }
    return dict(json.loads(json.dumps(made)))


def versions() -> dict[str, str]:
    """Of what traces models; others trace other programs, which have other plans."""
    import torch
    import transformers

    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


# ---------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Difference:
    """One value of a case that is not as it was. ``kind``: cost (seconds or bytes), plan (strategies, mesh or how the
    step runs), case (what was asked), or stop (only why the search ended, which is no other plan)."""

    case: str
    kind: str
    what: str
    before: str
    after: str


def differences(before: Mapping[str, Fingerprint], after: Mapping[str, Fingerprint]) -> list[Difference]:
    """Of the cases in ``after``; a case that the file has not is a difference."""
    found: list[Difference] = []
    for name, now in after.items():
        if name in before:
            found += _of_case(name, before[name], now)
        else:
            found.append(Difference(name, "case", "case", "not in the file", "planned"))
    return found


def _of_case(name: str, before: Fingerprint, after: Fingerprint) -> Iterator[Difference]:
    for key in ("objective_s", "step_s", "peak_bytes"):
        if not math.isclose(before[key], after[key], rel_tol=TOLERANCE):
            change = after[key] / before[key] - 1 if before[key] else math.inf
            yield Difference(name, "cost", key, f"{before[key]:.9g}", f"{after[key]:.9g} ({change:+.2g})")
    default = json.loads(json.dumps(asdict(Hybrid())))    # of fields that the file is older than
    for key in {**before["hybrid"], **after["hybrid"]}:
        known = default.get(key, "-")
        old, new = ({**known, **one["hybrid"].get(key, {})} if isinstance(known, dict) else
                    one["hybrid"].get(key, known) for one in (before, after))
        if old != new:
            yield Difference(name, "plan", f"hybrid.{key}", str(old), str(new))
    if before["strategies"] != after["strategies"]:
        yield Difference(name, "plan", "strategies", *_counts(before["counted"], after["counted"]))
    for key, kind in (("mesh", "plan"), ("model", "case"), ("stop", "stop")):
        if before[key] != after[key]:
            yield Difference(name, kind, key, str(before[key]), str(after[key]))


def _counts(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[str, str]:
    """How often the strategies are chosen whose number differs; where none does, they are of other ops."""
    odd = [key for key in {**before, **after} if before.get(key, 0) != after.get(key, 0)]
    if not odd:
        return "as many of each", "of other ops"
    told = (", ".join(f"{counted.get(key, 0)} {key}" for key in odd) for counted in (before, after))
    return next(told), next(told)


def verdict(found: list[Difference]) -> str:
    """One line; other plans of the same cost, which may be ties, are told apart from plans of another cost."""
    changed = {d.case for d in found if d.kind == "cost"}
    other = {d.case for d in found if d.kind == "plan"} - changed
    rest = {d.case for d in found} - changed - other
    return (f"{len(changed)} cases cost something else, {len(other)} have another plan of the same cost, {len(rest)} "
            "differ in what was asked or why the search ended")


def show(found: list[Difference], console: Console) -> None:
    table = Table("case", "kind", "what", "before", "after")
    for one in found:
        table.add_row(one.case, one.kind, one.what, one.before, one.after)
    console.print(table, markup=False)


# ------------------------------------------------------------------------------------------------------------- command


def fingerprints(names: list[str], keep: Path | None = None) -> dict[str, Fingerprint]:
    """Of the cases with these names; ``keep`` is a folder in which to save the plans, for `Plan.diff`."""
    cases, made = all_cases(), {}
    for name in names:
        found = cases[name].plan()
        made[name] = fingerprint(cases[name], found)
        if keep is not None:
            found.save(keep / f"{name}.json")
        typer.echo(f"{name}: {found.prediction.step_s:.6g} s, {found.evidence.stop_reason}", err=True)
    return made


def main(
    names: Annotated[list[str] | None, typer.Argument(help="cases, as 'llama 8x8'; all if none is given")] = None,
    write: Annotated[Path | None, typer.Option(help="the file to write")] = None,
    compare: Annotated[Path | None, typer.Option(help="the file to compare with")] = None,
    keep: Annotated[Path | None, typer.Option(help="a folder in which to save the plans")] = None,
) -> None:
    """Writes fingerprints of plans, or compares them with those of a file; exits with 1 where plans differ."""
    import torch
    import transformers

    if (write is None) == (compare is None):
        raise typer.BadParameter("give one of --write FILE and --compare FILE")
    if unknown := sorted(set(names or ()) - set(all_cases())):
        raise typer.BadParameter(f"no cases {unknown}; there are {', '.join(all_cases())}")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    made = fingerprints(list(names or all_cases()), keep)
    if compare is None:
        assert write is not None
        write.write_text(json.dumps({"versions": versions(), "cases": made}, indent=1, ensure_ascii=False) + "\n")
        return
    before = json.loads(compare.read_text())
    if before["versions"] != versions():
        typer.echo(f"the file is of {before['versions']}, this is {versions()}: programs may differ for that alone")
    found = differences(before["cases"], made)
    if found:
        show(found, Console(width=160))
    typer.echo(f"{len(made)} cases: {verdict(found)}")
    if any(one.kind != "stop" for one in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
