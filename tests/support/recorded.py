"""The collectives that emitted programs launch and await, recorded on ranks that are threads of this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from autoparallel.capture import Ref
from autoparallel.kernels import collectives, groups, rng
from autoparallel.kernels.expert_dispatch import Rows
from autoparallel.layout import Layout, local_boxes
from autoparallel.lower import emit
from autoparallel.lower.emit import PathFinder, Program
from autoparallel.partition import MicroBatches
from autoparallel.partition.stages import Stages
from autoparallel.plans import Hybrid
from autoparallel.pricing.expert_exchanges import ROWS
from autoparallel.runtime.initialise import cut_out
from autoparallel.runtime.interpret import values_of
from autoparallel.runtime.pipeline import Pipeline
from autoparallel.runtime.stage_module import StageModule
from autoparallel.runtime.step import Forward, run_micro_batches
from autoparallel.schedule.activation_windows import overlaps_activations
from autoparallel.schedule.expert_windows import alternates_experts
from autoparallel.strategies.space import Decision, Strategy, StrategySpace
from benchmarks import in_process
from benchmarks.in_process import on_every_rank
from tests.support.pipelines_in_process import pipelines_in_process

#: ("launch", action, axis, bytes) and ("wait", number of the launch).
Event = tuple[Any, ...]
#: Ops that communicate inside, at their own price.
_VARIANTS = ("ring.py", "halo.py", "softmax.py", "norm.py", "linear_sections.py", "variants.py")
_ACTIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


class Recorder:
    """Events by thread. ``inside``: whether a thread runs the backward of a step that an op made inside;
    ``shows_rows``: rows of experts are steps of their own, of unknown length, rather than within an op."""

    def __init__(self, shows_rows: bool) -> None:
        self.shows_rows = shows_rows
        self.within = _VARIANTS if shows_rows else (*_VARIANTS, "expert_dispatch.py")
        self.events: dict[int, list[Event]] = {}
        self.inside = threading.local()

    def mine(self) -> list[Event]:
        return self.events.setdefault(threading.get_ident(), [])

    def launched(self, op: Any, sent: torch.Tensor, args: tuple[Any, ...]) -> int:
        action = next(name for name in _ACTIONS if name in op.__name__)
        axis = next(arg for arg in args if isinstance(arg, str) and " at " in arg).partition(" at ")[0]
        num_bytes = sent.nbytes * (args[0] if action == "all_gather" else 1)
        if self.shows_rows and _moves_rows():
            action, num_bytes = ROWS, 0.0
        number = sum(event[0] == "launch" for event in self.mine())
        self.mine().append(("launch", action, axis, float(num_bytes)))
        return number


def _moves_rows() -> bool:
    """Whether rows of tokens go to their experts or back: how many, the data say."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(frame.f_locals.get("self"), Rows):
            return True
    return False


def _within_an_op(variants: Sequence[str]) -> bool:
    """Not where a block is recomputed, or parameters are gathered again, for the backward of an op, which reads what it
    saved. ``variants``: the files of ops."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_filename.endswith(("/kernels/recomputed.py", "/kernels/regather.py")):
            return False
        variant = code.co_filename.endswith(tuple(f"/kernels/{name}" for name in variants))
        if variant or code.co_name == "rows_exchanged_together":
            return True
    return False


@contextmanager
def recording(monkeypatch: Any, hybrid: Hybrid, within_ops: bool = False) -> Iterator[Recorder]:
    """Record what each thread launches and awaits, but for the communication within ops; or only this. ``hybrid``: of
    the step, of whose rows of experts the program may make steps of their own."""
    in_parts = overlaps_activations(hybrid) or alternates_experts(hybrid)
    recorder = Recorder(in_parts and not within_ops)
    begin, step = collectives._begin, collectives._Redistribute
    forward, backward = step.forward, step.backward

    def recorded(op: Any, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = in_process.collectives_run()
        finish = begin(op, sent, *args, **kwargs)
        runs = in_process.collectives_run() > before  # else an earlier result is taken again
        if not runs or within_ops != (getattr(recorder.inside, "on", False) or _within_an_op(recorder.within)):
            return finish
        number = recorder.launched(op, sent, args)

        def awaited() -> torch.Tensor:
            recorder.mine().append(("wait", number))
            return finish()

        return awaited

    def marked(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.inside = _within_an_op(recorder.within)
        return forward(ctx, *args)

    def back(ctx: Any, gradient: torch.Tensor) -> Any:
        recorder.inside.on = ctx.inside
        try:
            return backward(ctx, gradient)
        finally:
            recorder.inside.on = False

    with monkeypatch.context() as patch:
        patch.setattr(collectives, "_begin", recorded)
        patch.setattr(step, "forward", staticmethod(marked))
        patch.setattr(step, "backward", staticmethod(back))
        yield recorder


class RecordedStep(NamedTuple):
    """What a rank launches and awaits in a step, and the gradients of its local parameters (None: none)."""

    events: list[Event]
    gradients: list[torch.Tensor | None]


class Recorded:
    """Steps of a model, without the optimizer, on ranks that are threads, as the runtime runs them."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], micro: MicroBatches,
                 space: StrategySpace, strategies: Sequence[Strategy], path: PathFinder, monkeypatch: Any) -> None:
        self.micro, self.space, self.strategies, self.path = micro, space, strategies, path
        self.monkeypatch = monkeypatch
        self.state = {**dict(model.named_parameters(remove_duplicate=False)),
                      **dict(model.named_buffers(remove_duplicate=False)), **space.graph.constant_tensors}
        leaves = pytree.tree_leaves((tuple(args), dict(sorted(kwargs.items()))))
        known = {Ref(node.index): leaves[int(node.path)] for node in micro.whole.of_kind("input")}
        known |= {Ref(node.index): self.state[node.path] for node in micro.whole.of_kind("buffer")}
        self.fed = values_of(micro.whole, [feed.ref for feed in micro.feeds if feed.ref.node >= 0], known,
                             torch.device("cpu"))

    def step(self, hybrid: Hybrid) -> RecordedStep:
        """A step without a pipeline, on the first rank."""
        return self.steps(hybrid)[(0,) * len(self.space.mesh_shape)]

    def steps(self, hybrid: Hybrid, within_ops: bool = False) -> dict[tuple[int, ...], RecordedStep]:
        """The same by rank; ``within_ops``: as `recording`."""
        def rank(coordinate: tuple[int, ...]) -> RecordedStep:
            program = emit(self.space, self.strategies, self.path, coordinate)
            placed = list(zip(program.placeholders, program.placeholder_layouts, strict=True))
            parameters = self._parameters(program, coordinate)
            with rng.use_seed(0):
                if hybrid.is_plain:
                    inputs, read = iter(self._inputs(program, coordinate, 0)), iter(parameters)
                    given = [next(read if decision.kind == "parameter" else inputs) for decision, _ in placed]
                    outputs = Forward(program, hybrid, "eager")(*given)[0]
                    outputs[self.micro.loss].backward()
                else:
                    stage = StageModule(program, self.micro.loss, hybrid, groups.bound())
                    numbers = range(hybrid.micro_batches)
                    stage.begin(parameters, {n: self._inputs(program, coordinate, n) for n in numbers}, 0)
                    run_micro_batches(stage, numbers)
                    stage.finish()
            return RecordedStep(recorder.mine(), [parameter.grad for parameter in parameters])

        with recording(self.monkeypatch, hybrid, within_ops) as recorder:
            return on_every_rank(self.space.mesh_shape, self.space.axis_names, rank)

    def pipeline(self, hybrid: Hybrid, stages: Stages) -> list[RecordedStep]:
        """A step of a pipeline, by pipeline rank; messages are ("send" or "receive", peer, bytes), in this order with
        the collectives. Gradients of values that a rank reads, stage by stage."""
        mesh_shape, ranks = self.space.mesh_shape, hybrid.pipeline_ranks

        def rank(coordinate: tuple[int, ...]) -> RecordedStep:
            place, cell = coordinate[0], coordinate[1:]
            messages.enter(place, cell)
            axes, read, modules = groups.bound(), list[torch.Tensor](), dict[int, StageModule]()
            numbers = hybrid.micro_batches_of(place)
            for index in hybrid.stages_of(place):
                program = emit(self.space, self.strategies, self.path, cell, part=stages.parts[index])
                loss = self.micro.loss if index == hybrid.stages - 1 else None
                module = modules[index] = StageModule(program, loss, hybrid, axes)
                parameters = self._parameters(program, cell)
                module.begin(parameters, {n: self._inputs(program, cell, n) for n in numbers}, 0)
                read += parameters
            group: Any = "the pipeline"
            Pipeline(hybrid, modules, group, torch.device("cpu")).run()
            for module in modules.values():
                module.finish()
            return RecordedStep(recorder.mine(), [parameter.grad for parameter in read])

        with (recording(self.monkeypatch, hybrid) as recorder,
              pipelines_in_process(ranks, lambda event: recorder.mine().append(event), self.monkeypatch) as messages):
            found = on_every_rank((ranks, *mesh_shape), ("pipeline", *self.space.axis_names), rank)
        return [found[place, *(0,) * len(mesh_shape)] for place in range(ranks)]

    def _parameters(self, program: Program, coordinate: Sequence[int]) -> list[torch.Tensor]:
        return self._local(program, coordinate, ("parameter",), 0)

    def _inputs(self, program: Program, coordinate: Sequence[int], number: int) -> list[torch.Tensor]:
        return self._local(program, coordinate, ("buffer", "input"), number)

    def _local(self, program: Program, coordinate: Sequence[int], kinds: Sequence[str], number: int
               ) -> list[torch.Tensor]:
        placed = zip(program.placeholders, program.placeholder_layouts, strict=True)
        return [_shard(self._value(decision, number), layout, self.space.mesh_shape, coordinate)
                for decision, layout in placed if decision.kind in kinds]

    def _value(self, decision: Decision, number: int) -> torch.Tensor:
        if decision.kind != "input":
            return self.state[decision.path]
        feed = self.micro.feeds[int(decision.path)]
        whole = self.fed[feed.ref]
        split = feed.dim >= 0 and self.micro.count > 1
        return whole.chunk(self.micro.count, feed.dim)[number] if split else whole


def _shard(value: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    shard = cut_out(value.detach(), local_boxes(tuple(value.shape), layout, mesh_shape, coordinate))
    return shard.clone().requires_grad_(value.requires_grad)
