"""Every architecture, every plan: ``python -m benchmarks.model_zoo [NAMES...]``.

Each model of `benchmarks.architectures` is captured, planned for 4 ranks and run on them (threads of this process, see
`benchmarks.in_process`) under the chosen plan, a tensor-parallel plan, the best plan that cuts the batch nowhere, and 5
random plans; loss, outputs, gradients and updated buffers are held to the model's own. Where torch is built for CUDA,
the programs for GPUs run forward on tensors without data (no GPU is needed). Ops that no rule describes, and work that
the chosen plan repeats, are reported by their share of the step's FLOP.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.utils._pytree as pytree
import typer
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from autoparallel.capture import OpGraph, Ref, capture
from autoparallel.kernels import groups, rng
from autoparallel.layout import Box, Layout, local_boxes, local_shape
from autoparallel.lower import Program, check, emit
from autoparallel.lower.lookup_pass import look_up_on_host
from autoparallel.lower.overlapped import overlapped
from autoparallel.partition import Splits
from autoparallel.planning.meshes import best_of, mesh_shapes
from autoparallel.planning.options import Options
from autoparallel.plans import Hybrid
from autoparallel.pricing import Prices, SpacePricer
from autoparallel.runtime.initialise import cut_out
from autoparallel.search import solve
from autoparallel.strategies.host_lookups import HostLookups
from autoparallel.strategies.space import Decision, Strategy, StrategySpace
from benchmarks.architectures import ARCHITECTURES, Inputs
from benchmarks.in_process import Coordinate, axes_of, on_every_rank
from benchmarks.in_process import coordinates as all_coordinates
from benchmarks.other_architectures import OTHERS
from benchmarks.rounding import ZERO_IN_FLOAT32, ZERO_IN_FLOAT64, largest_entry
from benchmarks.zoo import build, inputs_of
from cost_models import Cluster

NUM_RANKS, NUM_RANDOM, TOLERANCE = 4, 5, 1e-5
SHARE_SHOWN = 0.01
#: What models say that cannot run in float64.
NOT_IN_FLOAT64 = ("got Double", "cannot be converted to type float without overflow")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """What one process computes: tensors of the output, gradients and buffers by name."""

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors
    zero: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """A plan to run: a strategy per decision, and the cluster that prices its redistributions."""

    space: StrategySpace
    strategies: tuple[Strategy, ...]
    direct: bool = False


@dataclass
class Report:
    """What became of one architecture. ``worst``: plan -> (error, tensor); ``failed``: step or plan -> why.

    ``undescribed`` (ops without a rule) and ``repeated`` (work that the chosen plan does on several ranks): op name ->
    share of the step's FLOP.
    """

    name: str
    num_ops: int = 0
    chosen: str = ""
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    undescribed: dict[str, float] = field(default_factory=dict)
    repeated: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failed and len(self.worst) == 3 + NUM_RANDOM

    def lines(self) -> Iterator[str]:
        error, tensor = max(self.worst.values(), default=(0.0, "-"))
        verdict = "equal" if self.passed else "FAILED" if self.failed or self.worst else "planned"
        yield (f"{self.name:12} {verdict:7} {len(self.worst)} plans, worst {error:.1e} ({tensor}); {self.num_ops} ops; "
               f"{self.chosen}; {self.seconds:.0f} s")
        for what, why in self.failed.items():
            yield f"    {what}: {why}"
        for title, shares in (("no rule", self.undescribed), ("repeated", self.repeated)):
            shown = [f"{op} {share:.1%}" for op, share in sorted(shares.items(), key=lambda item: -item[1])]
            if shown:
                yield f"    {title}: {', '.join(shown)}"


# ------------------------------------------------------------------------------------------------------- one process


def truth(model: nn.Module, inputs: Inputs) -> Truth:
    """The model's own step, and which tensors (what a norm makes of a single element, its mean) are zero but for
    rounding, known from a step in float64.

    Products of experts are not to be had in float64, nor masks of float32's least number: those models are taken at
    their word.
    """
    found = _step(copy.deepcopy(model), inputs)
    try:
        exact = _step(*_in_float64(model, inputs))
    except RuntimeError as error:
        if not any(reason in str(error) for reason in NOT_IN_FLOAT64):
            raise
        return found
    least = ZERO_IN_FLOAT64
    if not all(value.isfinite().all() for value in exact.outputs.values()):  # it adds masks of float64's least number
        exact, least = found, ZERO_IN_FLOAT32
    zero = (_zero(tensors, least) for tensors in (exact.outputs, exact.gradients, exact.buffers))
    return replace(found, zero=frozenset().union(*zero))


def _zero(tensors: Tensors, least: float = ZERO_IN_FLOAT64) -> frozenset[str]:
    """Those that are so small beside the largest that they are rounding."""
    real = {name: value for name, value in tensors.items() if value.is_floating_point()}
    bound = least * largest_entry(real)
    return frozenset(name for name, value in real.items() if largest_entry({name: value}) <= bound)


def _step(model: nn.Module, inputs: Inputs) -> Truth:
    output = model(**inputs)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Truth(_named_leaves(output), gradients, dict(model.named_buffers()))


def _in_float64(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    double = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return copy.deepcopy(model).double(), double


def _named_leaves(output: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(output)
    return {f"output {i}": leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


# ------------------------------------------------------------------------------------------------------ on the ranks


@dataclass(frozen=True)
class Shard:
    """One rank's part of a result, and the boxes of the whole of which it is made."""

    boxes: tuple[Box, ...]
    value: torch.Tensor

    def error(self, whole: torch.Tensor, scale: float) -> float:
        """Largest distance from the whole's part, over ``scale``; infinite for another shape or nan."""
        whole = cut_out(whole, self.boxes)
        if (whole.dtype, whole.shape) != (self.value.dtype, self.value.shape):
            return float("inf")
        distance = largest_entry({"": self.value.double() - whole.double()})
        error = distance / scale if scale and distance else distance
        return error if error == error else float("inf")


Shards = dict[str, list[Shard]]


class Ranks:
    """The programs of one plan, one for each rank, run together on one model's state."""

    def __init__(self, candidate: Candidate, cluster: Cluster) -> None:
        self.space = space = candidate.space
        path = Prices(space, cluster, direct=candidate.direct).path
        self.programs: dict[Coordinate, Program] = {}
        for coordinate in all_coordinates(space.mesh_shape):
            program = emit(space, candidate.strategies, path, coordinate)
            check(program, space, coordinate)
            self.programs[coordinate] = program

    def step(self, model: nn.Module, inputs: Inputs) -> tuple[Shards, Shards, Shards]:
        """Forward and backward; every rank's shards of outputs, gradients and updated buffers."""
        state = {**dict(model.named_parameters(remove_duplicate=False)),
                 **dict(model.named_buffers(remove_duplicate=False)), **self.space.graph.constant_tensors}
        leaves = pytree.tree_leaves(((), dict(sorted(inputs.items()))))
        made = on_every_rank(self.space.mesh_shape, self.space.axis_names,
                             lambda coordinate: self._rank(coordinate, state, leaves))
        gathered: tuple[Shards, Shards, Shards] = ({}, {}, {})
        for results in made.values():
            for all_shards, shards in zip(gathered, results, strict=True):
                for name, local_shard in shards.items():
                    all_shards.setdefault(name, []).append(local_shard)
        return gathered

    def _rank(self, coordinate: Coordinate, state: Mapping[str, Any], leaves: list[Any]
              ) -> tuple[dict[str, Shard], ...]:
        program, graph = self.programs[coordinate], self.space.graph
        local = [self._local(decision, layout, coordinate, leaves[int(decision.path)] if decision.kind == "input"
                             else state[decision.path])
                 for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)]
        outputs, updates = program.module(*local)[:2]
        pytree.tree_unflatten(list(outputs), graph.out_spec).loss.backward()
        results, gradients = {}, {}
        for number, (value, layout) in enumerate(zip(outputs, program.output_layouts, strict=True)):
            if layout is not None:
                results[f"output {number}"] = self._local_shard(value, graph.meta(graph.outputs[number]).shape, layout,
                                                          coordinate)
        for decision, layout, value in zip(program.placeholders, program.placeholder_layouts, local, strict=True):
            if decision.kind == "parameter" and value.grad is not None:
                gradients[decision.path] = self._local_shard(value.grad, state[decision.path].shape, layout, coordinate)
        buffers = {name: Shard(local_boxes(tuple(value.shape), (), (), ()), value)
                   for name, value in zip(program.updates, updates, strict=True)}
        return results, gradients, buffers

    def _local(self, decision: Decision, layout: Layout, coordinate: Coordinate, value: torch.Tensor) -> torch.Tensor:
        boxes = local_boxes(tuple(value.shape), layout, self.space.mesh_shape, coordinate)
        return cut_out(value.detach(), boxes).clone().requires_grad_(value.requires_grad)

    def _local_shard(
        self, value: torch.Tensor, shape: torch.Size | tuple[int, ...], layout: Layout, coordinate: Coordinate
    ) -> Shard:
        return Shard(local_boxes(tuple(shape), layout, self.space.mesh_shape, coordinate), value.detach())


def run_without_data(candidate: Candidate, cluster: Cluster, device: str = "cuda",
                     coordinates: Sequence[Coordinate] | None = None, on_host: Sequence[str] = ()) -> bool:
    """Forward of each rank's program (or of those at ``coordinates``) as it runs on ``device``, on tensors there that
    have no data: what an op would refuse, tensors of several devices together first of all, it refuses here. False: an
    op needed values (to which expert a token goes), and nothing behind it ran. Raises an op's error. (For "cuda" torch
    must be built for CUDA, or `benchmarks.cuda_without_gpu.load_guard` be called; a GPU is not needed, but backward
    would need one.) ``on_host``: tables that are in the host's memory, and looked up there."""
    space = candidate.space
    path, whole, lookups = Prices(space, cluster, direct=candidate.direct).path, True, HostLookups(space, on_host)
    for coordinate in coordinates or all_coordinates(space.mesh_shape):
        program = emit(space, candidate.strategies, path, coordinate, device)
        look_up_on_host(program.module, lookups.ops, device)
        module = overlapped(program.module, Hybrid())
        axes = {axis.name: axis for axis in axes_of(space.mesh_shape, space.axis_names, coordinate)}
        ran = False
        with suppress(DynamicOutputShapeException, DataDependentOutputException), FakeTensorMode(), groups.use(
                axes), rng.use_seed(1), torch.no_grad():
            local = [_without_data(space, decision, layout, coordinate, "cpu" if decision.index in lookups.tables
                                   else device) for decision, layout in zip(
                program.placeholders, program.placeholder_layouts, strict=True)]
            made = itertools.chain(*module(*local)[:2])
            if elsewhere := {value.device.type for value in made if isinstance(value, torch.Tensor)} - {device}:
                raise RuntimeError(f"results on {', '.join(elsewhere)} of a program for {device}")
            ran = True
        whole = whole and ran
    return whole


def _without_data(space: StrategySpace, decision: Decision, layout: Layout, coordinate: Coordinate, device: str
                  ) -> torch.Tensor:
    meta = space.graph.meta(Ref(decision.node))
    return torch.empty(local_shape(tuple(meta.shape), layout, space.mesh_shape, coordinate), dtype=meta.dtype,
                       device=device)


def worst_error(expected: Truth, found: tuple[Shards, Shards, Shards]) -> tuple[float, str]:
    """(largest relative error of any rank's shard of any tensor, that tensor's name)."""
    errors = [(0.0, "nothing")]
    for kind, whole, shards in zip(("", "gradient of ", "buffer "), (expected.outputs, expected.gradients,
                                                                     expected.buffers), found, strict=True):
        missing = whole.keys() - shards.keys() if kind != "buffer " else ()
        errors += [(float("inf"), f"{kind}{name} (missing)") for name in missing]
        for name, parts in shards.items():
            value = whole.get(name)
            if value is None:  # a parameter that the step does not use
                errors += [(largest_entry({name: part.value}), f"{kind}{name} (unused)") for part in parts]
                continue
            scale = largest_entry(whole if name in expected.zero else {name: value.double()})
            errors += [(part.error(value, scale), kind + name) for part in parts]
    return max(errors)


# -------------------------------------------------------------------------------------------------------------- plans


def toy_cluster(num_devices: int = NUM_RANKS) -> Cluster:
    """Devices for toy models: a call costs nothing, and computing 64 times as much as on an H100.

    A model of width 64 has 1/64 of the FLOP per byte of one of width 4096; on a real device its best plan would be to
    repeat everything. Here it is cut as the large model is there.
    """
    cluster = Cluster.load("h100-sxm", num_devices=num_devices, software="none")
    device = replace(cluster.device, launch_s=0.0, efficiency={}, memory_efficiency={}, tiles=None,
                     peak_flops_per_s={k: v / 64 for k, v in cluster.device.peak_flops_per_s.items()})
    links = tuple(replace(link, alpha_s=0.0, protocols={}) for link in cluster.links)
    return replace(cluster, device=device, links=links)


def candidates(graph: OpGraph, cluster: Cluster) -> dict[str, Callable[[], Candidate]]:
    """The plans to run, made when asked for."""
    def planned(shapes: Sequence[tuple[int, ...]], **options: Any) -> Candidate:
        plan = best_of(Splits(graph), cluster, shapes, None, Options(**options))
        space = StrategySpace(graph, plan.mesh_shape, plan.axis_names)
        return Candidate(space, tuple(plan.strategies_on(space)), plan.direct)

    found: dict[str, Callable[[], Candidate]] = {
        "chosen": partial(planned, mesh_shapes(NUM_RANKS)),
        "tensor": partial(planned, [(NUM_RANKS,)], baseline="tensor_parallel"),
        "whole batch": partial(whole_batch_candidate, graph, cluster),
    }
    for seed in range(NUM_RANDOM):
        found[f"random {seed}"] = partial(random_candidate, graph, (2, 2) if seed % 2 else (NUM_RANKS,), seed)
    return found


def whole_batch_candidate(graph: OpGraph, cluster: Cluster) -> Candidate:
    """The best plan of those that cut the batch nowhere, neither of an input nor of anything made of it."""
    space = StrategySpace(graph, (NUM_RANKS,))
    pricer = SpacePricer(Prices(space, cluster), allowed=without_batch(space))
    solution = solve(pricer.full(), pricer=pricer, time_limit_s=60.0)
    return Candidate(space, tuple(pricer.strategies_of(solution.choice)))


def without_batch(space: StrategySpace) -> dict[int, np.ndarray]:
    """The strategies of each decision that leave the batch whole; the rules' factors carry it from value to value."""
    lies: dict[tuple[int, int], set[int]] = {}  # (decision, output) -> its dims along which the batch lies
    allowed = {}
    for decision, s in zip(space.decisions, space.strategy_sets, strict=True):
        uses = space.uses_by.get(decision.index, ())
        batch = [(use.position, d) for use in uses for d in lies.get((use.source, use.output), ())]
        if decision.kind == "op" and s.rule is not None:
            factors = {s.rule.inputs[position][d] for position, d in batch} - {None}
            good = [number for number, one in enumerate(s.axis_strategies) if one.factor not in factors]
            found = [{d for d, factor in enumerate(dims) if factor in factors} for dims in s.rule.outputs]
        else:
            found = [{0} if decision.kind == "input" else {d for _, d in batch}] if s.output_metas else []
            good = [number for number, one in enumerate(s.axis_strategies)
                    if not any(p.is_shard and p.dim in dims for p, dims in zip(one.outputs, found, strict=True))]
        lies.update({(decision.index, output): dims for output, dims in enumerate(found)})
        allowed[decision.index] = np.flatnonzero(np.isin(s.array, good).all(axis=1))
    return allowed


def random_candidate(graph: OpGraph, mesh_shape: tuple[int, ...], seed: int) -> Candidate:
    """Every decision takes any of its strategies."""
    space, draw = StrategySpace(graph, mesh_shape), random.Random(seed)
    return Candidate(space, tuple(draw.choice(s.strategies) for s in space.strategy_sets))


def looking_up(candidate: Candidate, on_host: Sequence[str], seed: int) -> Candidate:
    """The candidate with these tables, and what reads them, in strategies with which they are read as they are
    stored."""
    space, draw, strategies = candidate.space, random.Random(seed), list(candidate.strategies)
    tables = HostLookups(space, on_host).tables
    readers = {table: [use for use in space.uses if use.source == table] for table in tables}
    for table in sorted(tables):
        s = space.strategy_sets[table]
        if space.decisions[table].kind == "parameter":
            stored = [c for c, number in enumerate(s.outputs[0]) if all(
                (space.strategy_sets[use.target].inputs[use.position] == number).any() for use in readers[table])]
            strategies[table] = s.strategies[draw.choice(stored)]
        number = s.outputs[0][s.position[strategies[table]]]
        for use in readers[table]:
            reads = space.strategy_sets[use.target]
            same = np.flatnonzero(reads.inputs[use.position] == number).tolist()
            strategies[use.target] = reads.strategies[draw.choice(same)]
    return replace(candidate, strategies=tuple(strategies))


# ----------------------------------------------------------------------------------------------------- shares of FLOP


def step_flops(space: StrategySpace, decision: Decision) -> float:
    """FLOP of an op forward and, where there is a gradient, backward."""
    s = space.strategy_sets[decision.index]
    assert s.rule is not None
    grad = any(m.requires_grad for m in s.output_metas)
    return s.rule.flops * (1 + s.rule.backward_flops * grad)


def shares(candidate: Candidate) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of the step's FLOP by op: of ops without a rule, and of work that all ranks of some axis repeat."""
    space = candidate.space
    flops, undescribed, repeated = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
    for decision, s, strategy in zip(space.decisions, space.strategy_sets, candidate.strategies, strict=True):
        if decision.kind != "op" or s.rule is None or s.rule.fixed or s.rule.alias:
            continue
        name, mine = space.graph.nodes[decision.node].op_name, step_flops(space, decision)
        flops += mine
        if not s.known:
            undescribed[name] += mine
        times = 1
        for number, size in zip(strategy, space.mesh_shape, strict=True):
            times *= 1 if s.axis_strategies[number].factor or s.axis_strategies[number].variant else size
        repeated[name] += mine * (times - 1) / (NUM_RANKS - 1)
    return ({op: n / flops for op, n in undescribed.items()},
            {op: n / flops for op, n in repeated.items() if n / flops > SHARE_SHOWN})


# ---------------------------------------------------------------------------------------------------------- one model


def examine(name: str, run: bool = True) -> Report:
    """Capture, plan and run one architecture; failures are told, never raised."""
    report, clock = Report(name), time.perf_counter()
    try:
        model, inputs, cluster = build(name), inputs_of(name), toy_cluster()
        graph = capture(model, (), inputs)
        report.num_ops = len(graph.of_kind("op"))
        expected = truth(model, inputs) if run else None
    except Exception as error:
        report.failed["capture"] = _why(error)
        return report
    for plan_name, make in candidates(graph, cluster).items():
        try:
            candidate = make()
            if plan_name == "chosen":
                report.chosen = "mesh " + "x".join(map(str, candidate.space.mesh_shape))
                report.undescribed, report.repeated = shares(candidate)
            if torch.backends.cuda.is_built():
                run_without_data(candidate, cluster)
            if expected is not None:
                found = worst_error(expected, Ranks(candidate, cluster).step(model, inputs))
                report.worst[plan_name] = found
                if not found[0] <= TOLERANCE:
                    report.failed[plan_name] = f"error {found[0]:.3g} in {found[1]}"
        except Exception as error:
            report.failed[plan_name] = _why(error)
    report.seconds = time.perf_counter() - clock
    return report


def _why(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error).strip()[:400]} [{place}]"


def main(
    names: Annotated[list[str] | None, typer.Argument(
        help="architectures; without, all 46; others: those of benchmarks/other_architectures.py")] = None,
    run: Annotated[bool, typer.Option(help="run the plans and compare; without, capture and plan only")] = True,
) -> None:
    """Every architecture under every plan, against one process."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    reports = []
    for name in OTHERS if names == ["others"] else names or ARCHITECTURES:
        reports.append(examine(name, run))
        for line in reports[-1].lines():
            print(line, flush=True)
    summary = {
        "models": len(reports),
        "captured": sum("capture" not in r.failed for r in reports),
        "passed": sum(r.passed for r in reports),
        "seconds": round(sum(r.seconds for r in reports)),
        "failed": {r.name: r.failed for r in reports if r.failed},
        "repeated": {r.name: r.repeated for r in reports if r.repeated},
        "reports": [asdict(r) for r in reports],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
