"""The form of a call, that is what tracing fixes, and the compiled programs by form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import ne
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.backends import EAGER
from autoparallel.backends.replayed import Replayed, why_not_recorded
from autoparallel.capture import refuse_other_layouts
from autoparallel.capture.contents import description
from autoparallel.capture.numbers import is_number, is_usual
from autoparallel.capture.passes import autocast
from autoparallel.capture.tracing.hf_caches import cached_leaves
from autoparallel.errors import InputError
from autoparallel.layout import Layout
from autoparallel.layout.redistribution import Axes
from autoparallel.lower.emit import Program
from autoparallel.lower.overlapped import overlapped
from autoparallel.partition import MicroBatches, Stages
from autoparallel.plans import Plan
from autoparallel.runtime.guards import Guards
from autoparallel.runtime.shared import Ranks
from autoparallel.runtime.step import Forward
from autoparallel.strategies.space import StrategySpace
from cost_models import Cluster

_LOG = logging.getLogger("autoparallel")
#: Namespaces of ops that send nothing themselves.
_SILENT = ("aten", "prims", "autoparallel")


@dataclass(frozen=True, eq=False)
class Compiled:
    """One compiled call form: plan, strategy space of one micro-batch, this rank's programs by stage, what runs them
    (`backends.BACKENDS`), the cluster that priced them, whether a program runs as CUDA graphs, and the sets of several
    mesh axes whose ranks sum tensors together, on any stage."""

    plan: Plan
    space: StrategySpace
    micro: MicroBatches
    stages: Stages
    programs: Mapping[int, Program]
    backend: str = EAGER
    cluster: Cluster | None = None
    replays: bool = False
    joint_axes: tuple[Axes, ...] = ()

    @property
    def program(self) -> Program:
        """The program of a form with one stage. Raises InputError for a pipeline."""
        if len(self.stages) > 1:
            raise InputError(f"the model is cut into {len(self.stages)} pipeline stages: it runs by step(...)")
        return self.programs[0]

    @cached_property
    def forward(self) -> nn.Module:
        """The program of a form with one stage as it runs: parameter communication overlapped, recompute applied;
        compiled at its first call if the backend compiles, recorded at its second if it replays."""
        hybrid = self.plan.hybrid
        if self.backend == EAGER and hybrid.recompute == "none" and hybrid.zero_stage < 3:
            module: nn.Module = overlapped(self.program.module, hybrid)
        else:
            module = Forward(self.program, hybrid, self.backend)
        return self._replayed(module) if self.replays else module

    @property
    def by_ops(self) -> nn.Module:
        """The program of a form with one stage as it runs, without CUDA graphs."""
        return self.forward.module if isinstance(self.forward, Replayed) else self.forward

    @property
    def is_recorded(self) -> bool:
        """Whether its program has been recorded as CUDA graphs."""
        return self.replays and isinstance(self.forward, Replayed) and self.forward.recorded > 0

    def op_by_op(self) -> AbstractContextManager[None]:
        """Within, calls run without CUDA graphs."""
        return self.forward.paused() if self.replays and isinstance(self.forward, Replayed) else nullcontext()

    @property
    def _starts(self) -> frozenset[int] | None:
        """The number of the loss among the program's results that are tensors; None without a loss."""
        loss, layouts = self.micro.loss, self.program.output_layouts
        return None if loss is None else frozenset([sum(layout is not None for layout in layouts[:loss])])

    def _replayed(self, module: nn.Module) -> nn.Module:
        """The program as CUDA graphs, if it can be recorded; else it runs as it is, and a warning says why."""
        program = self.program
        if (reason := why_not_recorded(program.module)) is not None:
            _LOG.warning("a program runs without CUDA graphs: %s", reason)
            return module
        stays = [decision.kind in ("parameter", "buffer") and decision.path not in program.updates
                 and decision.path not in self.space.graph.constant_tensors for decision in program.placeholders]
        return Replayed(module, stays, self._starts)

    @cached_property
    def sends_by_kernels(self) -> bool:
        """Whether all communication of its forward goes through `kernels.collectives`: one program, run node by node,
        without ops of other libraries."""
        ops = [node.target for node in self.space.graph.of_kind("op")]
        return self.backend == EAGER and self.plan.hybrid.is_plain and all(
            isinstance(op, torch._ops.OpOverload) and op.namespace in _SILENT for op in ops)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers (dropout)."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                   for node in self.space.graph.of_kind("op"))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The leaves of a call that are numbers which the programs read at each call."""
        return self.micro.whole.numbers

    @cached_property
    def cached(self) -> frozenset[int]:
        """Numbers of the outputs that are keys and values of a static cache."""
        return cached_leaves(self.space.graph.out_spec)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Layouts of the parameters that this rank's stages read, by name."""
        return {
            decision.path: layout
            for program in self.programs.values()
            for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
            if decision.kind == "parameter"
        }

    @property
    def elsewhere(self) -> set[str]:
        """Names of parameters that only other stages read. What none reads (only outputs beside the loss do) is on
        every rank, as a parameter that the model does not use."""
        read = {decision.path for part in self.stages.parts for decision in self.space.decisions
                if decision.kind == "parameter" and decision.index in part.decisions}
        return read - set(self.parameter_layouts) if len(self.stages) > 1 else set()

    @cached_property
    def shared(self) -> dict[str, Ranks]:
        """Parameters of several stages or ranks of the pipeline, with these ranks."""
        found = {}
        for decision in self.space.decisions:
            stages = [s for s, part in enumerate(self.stages.parts) if decision.index in part.decisions]
            ranks = self.plan.hybrid.ranks_of(*stages)
            if decision.kind == "parameter" and max(len(stages), len(ranks)) > 1:
                found[decision.path] = ranks
        return found

    @cached_property
    def written(self) -> dict[str, int]:
        """Buffers that the program writes: name -> first pipeline rank of the stage that computes the new value."""
        return {decision.path: self.plan.hybrid.ranks_of(stage)[0] for stage, part in enumerate(self.stages.parts)
                for decision in self.space.decisions if decision.kind == "update" and decision.index in part.decisions}


@dataclass(frozen=True, eq=False)
class _Traced:
    """A program with what its trace fixed beside the key: the values of ``constants`` (place -> description), and what
    the guards hold."""

    constants: Mapping[int, object]
    guards: Guards
    compiled: Compiled

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether this program serves a call with these numbers."""
        return (all(description(leaves[place]) == was for place, was in self.constants.items())
                and all(is_usual(leaves[place]) for place in self.compiled.numbers))


@dataclass
class _Numbers:
    """The number arguments of calls of one structure: of which values have changed (they become inputs of programs),
    and those that cannot, with the reason."""

    changed: set[int] = field(default_factory=set)
    fixed: dict[int, str] = field(default_factory=dict)


class Forms:
    """The programs of a module, by the form of a call and the guards of its trace; at most ``bound`` of them, of which
    the least recently used is dropped (not the first, whose layouts the parameters have).

    Numbers among the arguments are no part of a key. A program has them as constants; once another value of one is
    seen, later programs read it at each call, if they can."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.compiled = 0
        self._by_key: dict[Any, list[_Traced]] = {}
        self._numbers_of: dict[Any, _Numbers] = {}
        self._used: dict[Compiled, Any] = {}  # the least recently used first, with its key
        self._numbers: dict[Compiled, int] = {}
        self._arguments: dict[Compiled, Mapping[str, str]] = {}
        self._first: Compiled | None = None

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[Compiled]:
        """The least recently used first."""
        return iter(self._used)

    def first(self) -> Compiled | None:
        """The one that was compiled first."""
        return self._first

    def find(self, key: Any, leaves: Sequence[Any]) -> Compiled | None:
        """The program of this form whose guards hold for the model now, or None."""
        for traced in reversed(self._by_key.get(key, ())):
            if traced.takes(leaves) and traced.guards.hold(leaves):
                self._used[traced.compiled] = self._used.pop(traced.compiled)
                return traced.compiled
        return None

    def inputs_of(self, key: Any, spec: Any, leaves: Sequence[Any]) -> list[int]:
        """The numbers of a call of a new form that its program should read at each call: those that have had another
        value in a call of this structure."""
        numbers = self._numbers_of.setdefault(spec, _Numbers())
        for traced in self._by_key.get(key, ()):
            numbers.changed |= {place for place, was in traced.constants.items() if description(leaves[place]) != was}
        return [place for place in sorted(numbers.changed - numbers.fixed.keys()) if is_usual(leaves[place])]

    def holders(self) -> list[Any]:
        """The guards' containers of the original's modules."""
        return [holder for traced in chain.from_iterable(self._by_key.values()) for holder in traced.guards.holders()]

    def number(self, compiled: Compiled | None) -> int:
        """The number of a form, counted from 1 in the order of compilation, equal on all ranks; 0 for None."""
        return 0 if compiled is None else self._numbers[compiled]

    def changes(self, key: Any, leaves: Sequence[Any]) -> list[str]:
        """Descriptions of the changes since the last trace of this form; for a new form, of the settings (autocast,
        default dtype and device) that differ from the form used last."""
        if known := self._by_key.get(key):
            return list(dict.fromkeys(known[-1].guards.failing(leaves)))
        return list(_other_settings(key[0], next(reversed(self._used.values()))[0])) if self._used else []

    def other_uses(self, key: Any) -> list[str]:
        """Descriptions of the modes, trained parameters and kind of call in which a new form differs from the form used
        last."""
        if key in self._by_key or not self._used:
            return []
        return list(_other_uses(key, next(reversed(self._used.values()))))

    def other_arguments(self, key: Any, arguments: Mapping[str, str]) -> list[str]:
        """Descriptions of the arguments in which a new form differs from the form used last; ``arguments``: of each,
        by name, what tracing fixes."""
        if key in self._by_key or not self._used:
            return []
        before = self._arguments[next(reversed(self._used))]
        return [f"{name} is {arguments.get(name, 'absent')} and was {before.get(name, 'absent')}"
                for name in {**before, **arguments} if arguments.get(name) != before.get(name)]

    def add(self, key: Any, spec: Any, leaves: Sequence[Any], guards: Guards, compiled: Compiled,
            arguments: Mapping[str, str]) -> None:
        self.compiled += 1
        self._arguments[compiled] = arguments
        self._first = self._first or compiled
        constants = {place: description(leaf) for place, leaf in enumerate(leaves)
                     if is_number(leaf) and place not in compiled.numbers}
        self._numbers_of.setdefault(spec, _Numbers()).fixed.update(compiled.micro.whole.fixed)
        self._by_key.setdefault(key, []).append(_Traced(constants, guards, compiled))
        self._used[compiled], self._numbers[compiled] = key, self.compiled
        if len(self) > self.bound:
            self._drop(next((old for old in self._used if old is not self._first), compiled))

    def _drop(self, compiled: Compiled) -> None:
        key = self._used.pop(compiled)
        del self._numbers[compiled], self._arguments[compiled]
        self._by_key[key] = [kept for kept in self._by_key[key] if kept.compiled is not compiled]
        if not self._by_key[key]:
            del self._by_key[key]


#: (model in the right mode, args, kwargs, layouts of placed parameters, whether to compile one forward without
#: micro-batches and stages whatever the plan has, leaves that are to be inputs if they can) -> Compiled
Compile = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Mapping[str, Layout], bool, Sequence[int]], Compiled]


def form_of(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """The part of a call that tracing fixes: structure, shapes, dtypes, plain values but numbers, of which it has the
    type, autocast and default dtype."""
    refuse_other_layouts(leaves)
    casts = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in autocast.DEVICES]
    return (str(spec), *map(_form, leaves), *casts, torch.get_default_dtype(), torch.get_default_device())


def _other_settings(form: Any, before: Any) -> Iterator[str]:
    """The settings of torch that differ between two results of `form_of`, which ends with them."""
    settings = [*(f"autocast of {device}" for device in autocast.DEVICES), "the default dtype", "the default device"]
    count = len(settings)
    for name, now, was in zip(settings, form[-count:], before[-count:], strict=True):
        if now != was:
            yield f"{name} is {now or 'off'} and was {was or 'off'}"


def _other_uses(key: Any, before: Any) -> Iterator[str]:
    """The differences of modes, trainable parameters and kind of call (plain or step) between the keys of two forms."""
    (_, modes, trained, plain), (_, modes_before, trained_before, plain_before) = key, before
    if len(modes) == len(modes_before) and (turned := sum(map(ne, modes, modes_before))):
        yield f"{turned} of {len(modes)} modules were switched between train and eval mode"
    if len(trained) == len(trained_before) and (turned := sum(map(ne, trained, trained_before))):
        yield f"requires_grad of {turned} parameters was set"
    if plain != plain_before:
        yield "it is called, and was stepped" if plain else "it is stepped, and was called"


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if is_number(leaf):
        return type(leaf)
    return description(leaf)


def as_plain(leaf: Any, device: torch.device) -> Any:
    """An argument for tracing: a DTensor as an empty tensor of its global shape; on the meta device any tensor so."""
    if isinstance(leaf, DTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)
    if isinstance(leaf, torch.Tensor) and device.type == "meta":
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device,
                                   requires_grad=leaf.requires_grad)
    return leaf
