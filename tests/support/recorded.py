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
from autoparallel.layout import Layout, local_box
from autoparallel.lower import emit
from autoparallel.lower.emit import PathFinder
from autoparallel.partition import MicroBatches
from autoparallel.plans import Hybrid
from autoparallel.runtime.interpret import values_of
from autoparallel.runtime.stage_module import StageModule
from autoparallel.runtime.step import Forward, run_micro_batches
from autoparallel.strategies.space import Decision, Strategy, StrategySpace
from benchmarks import in_process
from benchmarks.in_process import on_every_rank

#: ("launch", action, axis, bytes) and ("wait", number of the launch).
Event = tuple[Any, ...]
#: Ops that communicate inside, at their own price.
_VARIANTS = ("ring.py", "halo.py", "softmax.py", "norm.py", "expert_dispatch.py", "linear_sections.py", "variants.py")
_ACTIONS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")


class Recorder:
    """Events by thread. ``inside``: whether a thread runs the backward of a step that an op made inside."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self.inside = threading.local()

    def mine(self) -> list[Event]:
        return self.events.setdefault(threading.get_ident(), [])

    def launched(self, op: Any, sent: torch.Tensor, args: tuple[Any, ...]) -> int:
        action = next(name for name in _ACTIONS if name in op.__name__)
        axis = next(arg for arg in args if isinstance(arg, str) and " at " in arg).partition(" at ")[0]
        num_bytes = sent.nbytes * (args[0] if action == "all_gather" else 1)
        number = sum(event[0] == "launch" for event in self.mine())
        self.mine().append(("launch", action, axis, float(num_bytes)))
        return number


def _within_an_op() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "exchanged_rows" or code.co_filename.endswith(tuple(f"/kernels/{n}" for n in _VARIANTS)):
            return True
    return False


@contextmanager
def recording(monkeypatch: Any) -> Iterator[Recorder]:
    """Record what each thread launches and awaits, but for the communication within ops."""
    recorder, begin, step = Recorder(), collectives._begin, collectives._Redistribute
    forward, backward = step.forward, step.backward

    def recorded(op: Any, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = in_process.collectives_run()
        finish = begin(op, sent, *args, **kwargs)
        runs = in_process.collectives_run() > before  # else an earlier result is taken again
        if not runs or getattr(recorder.inside, "on", False) or _within_an_op():
            return finish
        number = recorder.launched(op, sent, args)

        def awaited() -> torch.Tensor:
            recorder.mine().append(("wait", number))
            return finish()

        return awaited

    def marked(ctx: Any, *args: Any) -> torch.Tensor:
        ctx.inside = _within_an_op()
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
    """What the first rank launches and awaits in a step, and the gradients of its local parameters (None: none)."""

    events: list[Event]
    gradients: list[torch.Tensor | None]


def recorded_step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], micro: MicroBatches,
                  space: StrategySpace, strategies: Sequence[Strategy], path: PathFinder, hybrid: Hybrid,
                  monkeypatch: Any) -> RecordedStep:
    """A step (without the optimizer) on the first rank as the runtime runs it, without a pipeline."""
    state = {**dict(model.named_parameters(remove_duplicate=False)),
             **dict(model.named_buffers(remove_duplicate=False)), **space.graph.constant_tensors}
    leaves = pytree.tree_leaves((tuple(args), dict(sorted(kwargs.items()))))
    known = {Ref(node.index): leaves[int(node.path)] for node in micro.whole.of_kind("input")}
    known |= {Ref(node.index): state[node.path] for node in micro.whole.of_kind("buffer")}
    fed = values_of(micro.whole, [feed.ref for feed in micro.feeds if feed.ref.node >= 0], known, torch.device("cpu"))

    def value(decision: Decision, number: int) -> torch.Tensor:
        if decision.kind != "input":
            return state[decision.path]
        feed = micro.feeds[int(decision.path)]
        whole = fed[feed.ref]
        return whole.chunk(micro.count, feed.dim)[number] if feed.dim >= 0 and micro.count > 1 else whole

    def rank(coordinate: tuple[int, ...]) -> RecordedStep:
        program = emit(space, strategies, path, coordinate)
        placed = list(zip(program.placeholders, program.placeholder_layouts, strict=True))

        def local(kinds: Sequence[str], number: int) -> list[torch.Tensor]:
            return [_shard(value(decision, number), layout, space.mesh_shape, coordinate)
                    for decision, layout in placed if decision.kind in kinds]

        parameters = local(("parameter",), 0)
        with rng.use_seed(0):
            if hybrid.is_plain:
                inputs, read = iter(local(("buffer", "input"), 0)), iter(parameters)
                given = [next(read if decision.kind == "parameter" else inputs) for decision, _ in placed]
                outputs = Forward(program, hybrid, "eager")(*given)[0]
                outputs[micro.loss].backward()
            else:
                stage = StageModule(program, micro.loss, hybrid, groups.bound())
                numbers = range(hybrid.micro_batches)
                stage.begin(parameters, {n: local(("buffer", "input"), n) for n in numbers}, 0)
                run_micro_batches(stage, numbers)
                stage.finish()
        return RecordedStep(recorder.mine(), [parameter.grad for parameter in parameters])

    with recording(monkeypatch) as recorder:
        return on_every_rank(space.mesh_shape, space.axis_names, rank)[(0,) * len(space.mesh_shape)]


def _shard(value: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> torch.Tensor:
    shard = value.detach()
    for dim, (start, length) in enumerate(zip(*local_box(tuple(value.shape), layout, mesh_shape, coordinate),
                                              strict=True)):
        shard = shard.narrow(dim, start, length)
    return shard.clone().requires_grad_(value.requires_grad)
