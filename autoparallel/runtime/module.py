"""What `autoparallel.compile` returns: a module with the original's names whose calls run on the whole mesh."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cache, cached_property
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autoparallel.capture import OpGraph, Ref, canonical_call, precision
from autoparallel.errors import CaptureError, InputError
from autoparallel.hybrid import MicroBatches, Stages
from autoparallel.layout import INVARIANT, Layout, local_box, to_torch
from autoparallel.lower.emit import Program
from autoparallel.lower.overlap import overlap
from autoparallel.plans import Hybrid, Plan
from autoparallel.rules.space import StrategySpace
from autoparallel.runtime import data, groups, initialise, rng
from autoparallel.runtime.failing import Together
from autoparallel.runtime.interpret import values_of
from autoparallel.runtime.shared import Ranks, SharedGradients
from autoparallel.runtime.step import Forward, StepRunner, loss_of

_LOG = logging.getLogger("autoparallel")


@dataclass(frozen=True)
class Compiled:
    """One traced call form: its plan, the strategy space of one turn, and this rank's programs by stage."""

    plan: Plan
    space: StrategySpace
    micro: MicroBatches
    stages: Stages
    programs: Mapping[int, Program]

    @property
    def program(self) -> Program:
        """The program of a form that is one stage."""
        if len(self.stages) > 1:
            raise InputError(f"the model is cut into {len(self.stages)} pipeline stages: it runs by step(...)")
        return self.programs[0]

    @cached_property
    def forward(self) -> nn.Module:
        """The program of a form that is one stage, as it runs: parameters are on their way beside compute."""
        hybrid = self.plan.hybrid
        if hybrid.recompute == "none" and hybrid.zero_stage < 3:
            return overlap(self.program.module)
        return Forward(self.program, hybrid)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Layouts of the parameters that this rank has."""
        return {
            site.path: layout
            for program in self.programs.values()
            for site, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
            if site.kind == "parameter"
        }

    @property
    def elsewhere(self) -> set[str]:
        """Parameters that only other stages have."""
        read = {site.path for site in self.space.sites if site.kind == "parameter"}
        return read - set(self.parameter_layouts) if len(self.stages) > 1 else set()

    @cached_property
    def shared(self) -> dict[str, Ranks]:
        """Parameters of several stages or ranks of the pipeline, with these ranks."""
        found = {}
        for site in self.space.sites:
            stages = [s for s, part in enumerate(self.stages.parts) if site.index in part.sites]
            ranks = self.plan.hybrid.ranks_of(*stages)
            if site.kind == "parameter" and max(len(stages), len(ranks)) > 1:
                found[site.path] = ranks
        return found

    @cached_property
    def written(self) -> dict[str, int]:
        """Buffers that the program writes, with the first rank of the pipeline that computes what."""
        return {site.path: self.plan.hybrid.ranks_of(stage)[0] for stage, part in enumerate(self.stages.parts)
                for site in self.space.sites if site.kind == "update" and site.index in part.sites}


#: (model in the right mode, args, kwargs, layouts of parameters placed already, whether the form is plain: in one turn
#: and one stage whatever the plan) -> Compiled
Compile = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Mapping[str, Layout], bool], Compiled]


class ParallelModule(nn.Module):
    """A model on a mesh.

    Call it like the original. Plain tensors are global values, the same on all ranks; DTensors are what their
    placements say. Parameters are DTensors under the original names. A call of another form (shapes, structure, train
    or eval mode of any part, which parameters learn) is traced and planned anew, with the parameters where they are.
    """

    def __init__(self, model: nn.Module, site: groups.MeshSite, hybrid: Hybrid, compile_call: Compile) -> None:
        super().__init__()
        self._state = _State(model, site, hybrid, compile_call)
        self.training = model.training
        if callable(getattr(type(model), "generate", None)):
            self.__class__ = _generating(cast(Any, type(model)))

    # --- what a user asks ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the first call form. Raises InputError before there is one."""
        return self._first().plan

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh as given (parameters lie on it, or on this rank's stage of it)."""
        return self._state.site.whole

    def program(self) -> torch.fx.GraphModule:
        """This rank's (first) program, for reading: ``parallel.program().print_readable()``."""
        return next(iter(self._first().programs.values())).module

    def trace(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, step: bool = True) -> Compiled:
        """Trace, plan and lower the call ``self(*args, **kwargs)``, and place the parameters, without running it.

        ``step``: as `step` runs it, in its turns and stages; else as one forward.
        """
        state = self._state
        state.together.check()
        args, kwargs = canonical_call(args, kwargs or {})
        leaves, spec = pytree.tree_flatten((args, kwargs))
        plain = not step or state.hybrid.is_plain
        casts = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in precision.DEVICES]
        key = (str(spec), tuple(_form(leaf) for leaf in leaves), state.modes(), state.learning(), plain, *casts)
        if key not in state.forms:
            state.take_modes()
            on_meta = any(p.device.type == "meta" for p in state.model.parameters())
            shapes = [_as_plain(leaf, torch.device("meta") if on_meta else state.device) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(shapes, spec)
            call = _call_text(args, kwargs)
            if state.forms and dist.get_rank() == 0:  # it takes seconds
                _LOG.warning("%s is compiled for a call of another form (form %d): %s", type(state.model).__name__,
                             len(state.forms) + 1, call)
            try:
                with state.together.call(ends=False):
                    compiled = state.compile_call(state.model, args, kwargs, state.layouts,
                                                  plain and not state.hybrid.is_plain)
            except CaptureError as error:
                if state.calls_traced:
                    error.args = (f"{error}\n  This call: {call}\n  Traced before: {'; '.join(state.calls_traced)}",)
                raise
            if not state.forms:
                with torch.inference_mode(False):  # parameters learn later
                    self._place(compiled)
            state.forms[key] = compiled
            state.calls_traced[call] = None
        return state.forms[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        if not state.forms:
            self.trace(args, kwargs)
        if state.hybrid.stages > 1:
            raise InputError(f"the model is cut into {state.hybrid.stages} pipeline stages: call "
                             "parallel.step(...), which runs forward and backward of a whole step")
        compiled = self.trace(args, kwargs, step=False)
        with state.together.call():
            outputs = self._run(compiled, pytree.tree_leaves(canonical_call(args, kwargs)))
            results = [
                value if layout is None else self._global_output(value, layout, compiled.space, number)
                for number, (value, layout) in enumerate(zip(outputs, compiled.program.output_layouts, strict=True))
            ]
        return pytree.tree_unflatten(results, compiled.space.graph.out_spec)

    def _run(self, compiled: Compiled, leaves: Sequence[Any]) -> Sequence[Any]:
        """Forward of a form that is one stage in one turn; returns this rank's outputs."""
        state, program, space = self._state, compiled.program, compiled.space
        with groups.use(state.axes):
            local = initialise.local_pieces([
                self._local_input(leaves[int(site.path)], layout) if site.kind == "input"
                else self._state_of(site.path, space.graph).clone() if site.path in program.updates  # backward reads it
                else self._state_of(site.path, space.graph)
                for site, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
            ])
            with rng.use_seed(rng.mix(state.seed, state.calls)), precision.without_autocast():
                outputs, updates, _ = compiled.forward(*local)
        state.calls += 1
        self._update(program.updates, updates)
        return cast(Sequence[Any], outputs)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one step over the whole batch; returns the loss, detached.

        The model must return a scalar loss: alone, first in a tuple, or as ``loss`` of a structure. With
        micro-batches and pipeline stages it is the same step, in turns; every rank returns the loss. Then DTensor
        inputs are gathered first: each turn's samples may lie anywhere. Under torch.no_grad nothing learns: the loss of
        a pipeline in evaluation. Where a rank fails, all others raise PeerError, which says why.
        """
        state = self._state
        compiled = self.trace(args, kwargs)
        leaves = pytree.tree_leaves(canonical_call(args, kwargs))
        if len(compiled.stages) > 1 and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise InputError("an input requires a gradient, of which each rank would have the part of its own pipeline "
                             "stages only\n  Give it detached, or run the model without a pipeline.")
        run = self._whole_step if compiled.plan.hybrid.is_plain else self._turns
        with state.together.call():
            return run(compiled, leaves)

    def _whole_step(self, compiled: Compiled, leaves: Sequence[Any]) -> torch.Tensor:
        """A step of a form that is one stage in one turn."""
        loss = cast(torch.Tensor, self._run(compiled, leaves)[loss_of(compiled.micro.loss)])
        if torch.is_grad_enabled():
            with precision.without_autocast(), groups.use(self._state.axes):
                loss.backward()
        return loss.detach()

    def _turns(self, compiled: Compiled, leaves: Sequence[Any]) -> torch.Tensor:
        """A step in turns or stages."""
        state, key = self._state, id(compiled)
        if key not in state.runners:
            state.runners[key] = StepRunner(
                compiled.programs, compiled.micro.loss, compiled.plan.hybrid, state.axes, state.site.pipeline_group,
                state.device,
            )
            own = {name: ranks for name, ranks in compiled.shared.items() if name in compiled.parameter_layouts}
            state.shared_gradients[key] = SharedGradients(self.get_parameter, own, state.shared_groups,
                                                          compiled.plan.hybrid.sum_dtype)
        feeds = self._feeds(compiled, leaves)
        with state.shared_gradients[key].added_up() as shared, precision.without_autocast():
            loss = state.runners[key].run(
                lambda program: initialise.local_pieces([
                    shared[site.path] if site.path in shared else self._state_of(site.path, compiled.space.graph)
                    for site in program.placeholders if site.kind == "parameter"
                ]),
                lambda program, turn: [
                    self._local_input(feeds[int(site.path)][turn], layout) if site.kind == "input"
                    else self._state_of(site.path, compiled.space.graph)
                    for site, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
                    if site.kind != "parameter"
                ],
                rng.mix(state.seed, state.calls),
            )
        state.calls += 1
        for module in state.runners[key].modules.values():
            self._update(module.program.updates, module.updates)
        self._share_written(compiled)
        return loss

    def _update(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():  # a new value may be another buffer's old one
            for name, value in zip(names, [value.clone() for value in values], strict=True):
                self.get_buffer(name).copy_(value)

    def _share_written(self, compiled: Compiled) -> None:
        """Give the buffers that one stage has written to the others, which may read them in the next step."""
        if (group := self._state.site.pipeline_group) is not None:
            for name, rank in compiled.written.items():
                dist.broadcast(self.get_buffer(name), dist.get_global_rank(group, rank), group=group)

    def _feeds(self, compiled: Compiled, leaves: Sequence[Any]) -> list[list[Any]]:
        """Each input of the turns' program, turn by turn."""
        state, micro = self._state, compiled.micro
        if micro.count == 1:
            return [[leaf] for leaf in leaves]
        known: dict[Ref, torch.Tensor] = {}
        for node in micro.whole.of_kind("input"):
            leaf = leaves[int(node.path)]
            known[Ref(node.index)] = (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).to(state.device)
        for node in micro.whole.of_kind("buffer"):
            known[Ref(node.index)] = self._state_of(node.path, micro.whole)
        with torch.no_grad():
            values = values_of(micro.whole, [feed.ref for feed in micro.feeds], known, state.device)
        return [
            list(values[feed.ref].chunk(micro.count, feed.dim)) if feed.dim >= 0 else [values[feed.ref]] * micro.count
            for feed in micro.feeds
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm together is at most ``max_norm``; returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`, under every plan: pieces, and stages of a pipeline, count together, a
        parameter that several ranks of the pipeline have counts once.
        """
        compiled, site = self._first(), self._state.site
        total = torch.zeros((), dtype=torch.float64, device=self._state.device)
        infinite = norm_type == float("inf")
        for name, parameter in self.named_parameters():
            if parameter.grad is None or compiled.shared.get(name, (site.pipeline_rank,))[0] != site.pipeline_rank:
                continue
            norm = torch.linalg.vector_norm(parameter.grad, norm_type)
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double()
            total = torch.maximum(total, norm) if infinite else total + norm**norm_type
        if (group := site.pipeline_group) is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = total if infinite else total ** (1 / norm_type)
        factor = float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return total.float()

    def train(self, mode: bool = True) -> ParallelModule:
        """As the original's ``train``, which may keep some of its parts in eval mode."""
        state = self._state
        state.model.train(mode)
        self.training = state.model.training
        for module, part in state.parts.items():
            part.training = module.training
        return self

    def manual_seed(self, seed: int) -> None:
        """Restart the random ops (dropout) from this seed; the same on all ranks."""
        self._state.seed, self._state.calls = seed, 0

    def shard_batch(self, batch: Any) -> Any:
        """The same structure with each tensor a DTensor in the layout that the program reads.

        ``batch`` is what the model is called with: a mapping of keyword arguments, or a tuple of arguments, of global
        tensors. Each rank keeps its own piece only.
        """
        args, kwargs = _as_call(batch)
        if not self._state.hybrid.is_plain:
            raise InputError("a step in micro-batches or stages takes the whole batch: call step(...) with it as it is")
        compiled = self.trace(args, kwargs)
        leaves, spec = pytree.tree_flatten(canonical_call(args, kwargs))
        for site, layout in zip(compiled.program.placeholders, compiled.program.placeholder_layouts, strict=True):
            if site.kind == "input" and not isinstance(leaves[int(site.path)], DTensor):
                leaves[int(site.path)] = self._shard(leaves[int(site.path)], layout)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return kwargs if isinstance(batch, Mapping) else args

    def dataloader(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool = False, seed: int = 0,
                   collate_fn: Callable[[list[Any]], Any] | None = None, **options: Any) -> data.ShardedLoader:
        """Batches of ``batch_size`` samples over all ranks, of which each rank reads its own piece only.

        A sample (or what ``collate_fn`` makes of a list of them) is what the model is called with: a mapping of keyword
        arguments, or a tuple of arguments. All ranks draw one order from ``seed`` and the epoch (`set_epoch`). Further
        options are those of torch's DataLoader. With micro-batches or stages, each rank reads whole batches.

        Raises InputError for a dataset without length, smaller than a batch, or with tensors that are not by sample.
        """
        batch = data.example_batch(dataset, batch_size, collate_fn)
        leaves, spec = pytree.tree_flatten(batch)
        state, layouts = self._state, dict[int, Layout]()
        if state.hybrid.is_plain:
            program = self.trace(*_as_call(batch)).program
            numbers = pytree.tree_leaves(canonical_call(*_as_call(pytree.tree_unflatten(range(len(leaves)), spec))))
            layouts = {numbers[int(site.path)]: layout for site, layout
                       in zip(program.placeholders, program.placeholder_layouts, strict=True) if site.kind == "input"}
        rows = data.rows_read(leaves, layouts, state.mesh, batch_size)
        sampler = data.RowSampler(len(cast(Sized, dataset)), batch_size, rows, shuffle, seed)
        loader = DataLoader(dataset, batch_sampler=cast(Any, sampler), collate_fn=collate_fn, **options)
        return data.ShardedLoader(loader, sampler, layouts, state.mesh, state.device)

    def init_weights(self, device: torch.device | str | None = None) -> None:
        """Give a meta-device model its initial weights, module by module; only the local pieces are kept.

        Every module that owns parameters must know how to initialise them (``reset_parameters``, or the model's
        ``_init_weights(module)``). All ranks draw the same numbers.
        """
        self._first()
        state = self._state
        state.seed = initialise.shared_seed(state.seed)
        initialise.init_weights(state.model, self, state.mesh, torch.device(device or state.device), state.seed)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load global tensors (or DTensors) by the original names; each rank takes its piece."""
        if not self._state.forms:
            return self._state.model.load_state_dict(state_dict, strict, assign)
        result = initialise.load_state_dict(self._state.model, self, state_dict, self._state.device, strict)
        initialise.init_lost_buffers(self._state.model, self, self._state.device)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._first()
        return nn.Module.state_dict(self, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._first()
        return nn.Module.named_parameters(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            state = self.__dict__.get("_state")
            if state is None or name.startswith("__"):
                raise
            return self._as_own(state.model, name)

    def _as_own(self, model: nn.Module, name: str) -> Any:
        """An attribute of the original. Its methods and properties become this module's: they call this module and read
        its parameters, as the original's are not trained."""
        described = inspect.getattr_static(type(model), name, None)
        if isinstance(described, property) and described.fget is not None:
            return described.fget(self)
        if isinstance(described, cached_property):
            return described.func(self)
        value = getattr(model, name)
        if isinstance(value, MethodType) and value.__self__ is model:
            return MethodType(value.__func__, self)
        return value

    # --- placing and converting ---------------------------------------------------------------------------------

    def _first(self) -> Compiled:
        forms = self._state.forms
        if not forms:
            raise InputError("the model has not been traced yet, so its parameters have no place: call it once, or "
                             "give example_inputs or example_kwargs to autoparallel.compile")
        return next(iter(forms.values()))

    def _place(self, compiled: Compiled) -> None:
        """Make the module tree with the original's names: parameters as DTensors, buffers whole on every rank."""
        state = self._state
        model, mesh = state.model, state.mesh
        layouts, elsewhere = compiled.parameter_layouts, compiled.elsewhere
        state.make_shared_groups(sorted(set(compiled.shared.values())))
        everywhere = (INVARIANT,) * mesh.ndim
        state.parts = initialise.make_parts(self, model)
        self.training = model.training
        placed: dict[int, nn.Parameter | torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            value = state.same_on_pipeline(parameter.detach())
            if compiled.micro.whole.aliases.get(name, name) in elsewhere:
                continue
            owner, leaf = initialise.container(self, name)
            if id(parameter) not in placed:
                layout = layouts.get(name, everywhere)
                state.layouts[name] = layout
                placed[id(parameter)] = nn.Parameter(
                    initialise.place(value, mesh, layout, state.device), parameter.requires_grad
                )
            owner._parameters[leaf] = placed[id(parameter)]  # type: ignore[assignment]
        for path, owner_module in model.named_modules():
            for leaf, buffer in owner_module._buffers.items():
                if buffer is not None:
                    name = f"{path}.{leaf}" if path else leaf
                    owner, _ = initialise.container(self, name)
                    if id(buffer) not in placed:
                        value = state.same_on_pipeline(buffer.detach())
                        placed[id(buffer)] = initialise.same_everywhere(value, mesh, state.device)
                    owner._buffers[leaf] = placed[id(buffer)]
                    if leaf in owner_module._non_persistent_buffers_set:
                        owner._non_persistent_buffers_set.add(leaf)

    def _state_of(self, path: str, graph: OpGraph) -> torch.Tensor:
        """A parameter, buffer or constant."""
        if path in graph.constant_tensors:
            return graph.constant_tensors[path].to(self._state.device)
        owner, leaf = initialise.container(self, path)
        value = cast(torch.Tensor, owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf])
        if value.device.type == "meta":
            raise InputError(f"{path} is still on the meta device: call init_weights() or load_state_dict(...) first")
        return value

    def _local_input(self, value: torch.Tensor, layout: Layout) -> torch.Tensor:
        if not isinstance(value, DTensor):
            value = DTensor.from_local(
                value.to(self._state.device), self._state.mesh, to_torch((INVARIANT,) * len(layout)), run_check=False
            )
        elif value.device_mesh != self._state.mesh:
            raise InputError(f"an input lies on the mesh {value.device_mesh}, the model on {self._state.mesh}")
        return value.redistribute(placements=to_torch(layout)).to_local()

    def _shard(self, value: torch.Tensor, layout: Layout) -> DTensor:
        mesh = self._state.mesh
        offsets, shape = local_box(tuple(value.shape), layout, mesh.shape, mesh.get_coordinate() or ())
        for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
            value = value.narrow(dim, start, length)
        return initialise.as_dtensor(value.to(self._state.device).contiguous(), mesh, layout)

    def _global_output(self, value: torch.Tensor, layout: Layout, space: StrategySpace, number: int) -> torch.Tensor:
        if all(p == INVARIANT for p in layout):
            return value
        meta = space.graph.meta(space.graph.outputs[number])
        made = initialise.as_dtensor(value, self._state.mesh, layout, meta.shape)
        return made.full_tensor() if self._state.gathers else made


@cache
def _generating(original: Any) -> type[ParallelModule]:
    """ParallelModule, also of the class of a model that generates: Hugging Face's ``generate`` looks there for its
    methods and for what ``forward`` takes. The calls that it makes return whole tensors; all ranks draw alike."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    @functools.wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: _State = self._state
        state.gathers = True
        try:
            with torch.random.fork_rng():
                torch.manual_seed(rng.mix(state.seed, state.calls))
                return original.generate(self, *args, **kwargs)
        finally:
            state.gathers = False

    def namespace(members: dict[str, Any]) -> None:
        members.update(forward=forward, generate=generate, __doc__=ParallelModule.__doc__)

    return cast(type[ParallelModule], types.new_class(f"Parallel{original.__name__}", (ParallelModule, original), {},
                                                      namespace))


@dataclass
class _State:
    """What the module keeps beside its parameters."""

    model: nn.Module
    site: groups.MeshSite
    hybrid: Hybrid
    compile_call: Compile

    def __post_init__(self) -> None:
        self.mesh = self.site.mesh
        self.axes = groups.bind(self.mesh)
        self.together = Together(self.site.whole)
        self.forms: dict[Any, Compiled] = {}
        self.parts: dict[nn.Module, nn.Module] = {}
        self.calls_traced: dict[str, None] = {}
        self.runners: dict[int, StepRunner] = {}
        self.layouts: dict[str, Layout] = {}
        self.shared_groups: dict[Ranks, dist.ProcessGroup] = {}
        self.shared_gradients: dict[int, SharedGradients] = {}
        self.calls = 0
        self.gathers = False
        self.seed = initialise.shared_seed(torch.initial_seed())
        self.device = torch.device(self.mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def modes(self) -> tuple[bool, ...]:
        """Whether each part trains: a part may stay in eval mode while the others train."""
        return tuple(part.training for part in self.parts.values() or self.model.modules())

    def learning(self) -> tuple[bool, ...]:
        """Whether each parameter learns: some may be frozen, and learn later. Raises InputError where a rank would have
        to tell those of other pipeline stages, which have other parameters."""
        if self.hybrid.stages == 1:
            parts = self.parts.values() or self.model.modules()
            return tuple(p.requires_grad for part in parts for p in part._parameters.values() if p is not None)
        for module, part in self.parts.items():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad > module.get_parameter(name).requires_grad:
                    raise InputError(f"{type(part).__name__}.{name} was frozen when the pipeline was compiled, and is "
                                     "to learn now\n  Compile again, with all that may learn (freezing is possible at "
                                     "any time).")
        return ()

    def take_modes(self) -> None:
        """Give the original's modules the modes of their parts, and say which of its parameters learn."""
        for module, part in self.parts.items():
            module.training = part.training
            for name, parameter in part._parameters.items():
                if parameter is not None and self.hybrid.stages == 1:
                    module.get_parameter(name).requires_grad_(parameter.requires_grad)

    def make_shared_groups(self, ranks_together: Sequence[Ranks]) -> None:
        """Process groups of these ranks of the pipeline, beside each place in a stage. All ranks call this."""
        for ranks in filter(lambda ranks: len(ranks) > 1, ranks_together):
            for column in self.site.whole.mesh.flatten(1).t().tolist():
                group = dist.new_group([column[rank] for rank in ranks])
                if dist.get_rank() in column and self.site.pipeline_rank in ranks:
                    self.shared_groups[ranks] = group
                    self.together.groups.append(group)

    def same_on_pipeline(self, value: torch.Tensor) -> torch.Tensor:
        """A value as the pipeline's first rank has it."""
        group = self.site.pipeline_group
        if group is None or value.device.type == "meta":
            return value
        value = value.to(self.device).clone()
        dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
        return value


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf).__name__, leaf if isinstance(leaf, (int, float, str, bool, type(None))) else repr(leaf)


def _as_call(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as the arguments and keyword arguments of a call."""
    if isinstance(batch, Mapping):
        return (), batch
    return ((batch,) if isinstance(batch, torch.Tensor) else tuple(batch)), {}


def _call_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The form of a call, as (float32[8, 16], labels=int64[8])."""

    def text(value: Any) -> str:
        leaves = pytree.tree_map_only(torch.Tensor, lambda t: f"{t.dtype}{list(t.shape)}".removeprefix("torch."), value)
        return leaves if isinstance(leaves, str) else repr(leaves).replace("'", "")

    return f"({', '.join([*map(text, args), *(f'{name}={text(value)}' for name, value in kwargs.items())])})"


def _as_plain(leaf: Any, device: torch.device) -> Any:
    """A DTensor as a tensor of its global shape, for tracing; of a meta-device model every tensor is a shape only."""
    if isinstance(leaf, DTensor) or (isinstance(leaf, torch.Tensor) and device.type == "meta"):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)
    return leaf

