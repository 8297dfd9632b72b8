"""What `autoparallel.compile` returns: a module with the original's names whose calls run on the whole mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.capture import canonical_call
from autoparallel.errors import InputError
from autoparallel.layout import INVARIANT, Layout, local_box, to_torch
from autoparallel.lower.emit import Program
from autoparallel.plans import Plan
from autoparallel.rules.space import StrategySpace
from autoparallel.runtime import groups, initialise, rng


@dataclass(frozen=True)
class Compiled:
    """One traced call form: its plan, strategy space and this rank's program."""

    plan: Plan
    space: StrategySpace
    program: Program

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        return {
            site.path: layout
            for site, layout in zip(self.program.placeholders, self.program.placeholder_layouts, strict=True)
            if site.kind == "parameter"
        }


#: (model in the right mode, args, kwargs, layouts of parameters placed already) -> Compiled
Compile = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Mapping[str, Layout]], Compiled]


class ParallelModule(nn.Module):
    """A model on a mesh.

    Call it like the original. Plain tensors are global values, the same on all ranks; DTensors are what their
    placements say. Parameters are DTensors under the original names. A call of another form (shapes, structure, train
    or eval) is traced and planned anew, with the parameters where they are.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, compile_call: Compile) -> None:
        super().__init__()
        axes = groups.bind(mesh)
        self._state = _State(model, mesh, axes, compile_call)
        self.training = model.training

    # --- what a user asks ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the first call form. Raises InputError before there is one."""
        return self._first().plan

    @property
    def mesh(self) -> DeviceMesh:
        return self._state.mesh

    def program(self) -> torch.fx.GraphModule:
        """This rank's program, for reading: ``parallel.program().print_readable()``."""
        return self._first().program.module

    def trace(self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Compiled:
        """Trace, plan and lower the call ``self(*args, **kwargs)``, and place the parameters, without running it."""
        state = self._state
        args, kwargs = canonical_call(args, kwargs or {})
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (str(spec), tuple(_form(leaf) for leaf in leaves), self.training)
        if key not in state.forms:
            state.model.train(self.training)
            on_meta = any(p.device.type == "meta" for p in state.model.parameters())
            plain = [_as_plain(leaf, torch.device("meta") if on_meta else state.device) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(plain, spec)
            compiled = state.compile_call(state.model, args, kwargs, state.layouts)
            if not state.forms:
                self._place(compiled)
            state.forms[key] = compiled
        return state.forms[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        compiled = self.trace(args, kwargs)
        program, space = compiled.program, compiled.space
        leaves = pytree.tree_leaves(canonical_call(args, kwargs))
        with groups.use(state.axes):
            local = [
                self._local_input(leaves[int(site.path)], layout) if site.kind == "input"
                else self._local_state(site.path, space)
                for site, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
            ]
            with rng.use_seed(rng.mix(state.seed, state.calls)):
                outputs, updates = program.module(*local)
        state.calls += 1
        with torch.no_grad():
            for name, value in zip(program.updates, updates, strict=True):
                self.get_buffer(name).copy_(value)
        results = [
            value if layout is None else self._global_output(value, layout, space, number)
            for number, (value, layout) in enumerate(zip(outputs, program.output_layouts, strict=True))
        ]
        return pytree.tree_unflatten(results, space.graph.out_spec)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one step; returns the loss, detached.

        The model must return a scalar, or a structure with a ``loss``.
        """
        output = self(*args, **kwargs)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if loss is None or loss.dim() != 0:
            raise InputError(f"step needs a scalar loss; the model returned {type(output).__name__}: return the loss, "
                             "or a structure with an attribute `loss`")
        loss.backward()
        return loss.detach()

    def manual_seed(self, seed: int) -> None:
        """Restart the random ops (dropout) from this seed; the same on all ranks."""
        self._state.seed, self._state.calls = seed, 0

    def shard_batch(self, batch: Any) -> Any:
        """The same structure with each tensor a DTensor in the layout that the program reads.

        ``batch`` is what the model is called with: a mapping of keyword arguments, or a tuple of arguments, of global
        tensors. Each rank keeps its own piece only.
        """
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        compiled = self.trace(args, kwargs)
        leaves, spec = pytree.tree_flatten(canonical_call(args, kwargs))
        for site, layout in zip(compiled.program.placeholders, compiled.program.placeholder_layouts, strict=True):
            if site.kind == "input" and not isinstance(leaves[int(site.path)], DTensor):
                leaves[int(site.path)] = self._shard(leaves[int(site.path)], layout)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return kwargs if isinstance(batch, Mapping) else args

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
        result = initialise.load_state_dict(self, state_dict, self._state.device, strict)
        initialise.init_lost_buffers(self._state.model, self, self._state.device)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._first()
        return super().state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._first()
        return super().named_parameters(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            state = self.__dict__.get("_state")
            if state is None or name.startswith("__"):
                raise
            return getattr(state.model, name)

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
        layouts = compiled.parameter_layouts
        everywhere = (INVARIANT,) * mesh.ndim
        placed: dict[int, nn.Parameter | torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner, leaf = initialise.container(self, name)
            if id(parameter) not in placed:
                layout = layouts.get(name, everywhere)
                state.layouts[name] = layout
                placed[id(parameter)] = nn.Parameter(
                    initialise.place(parameter.detach(), mesh, layout, state.device), parameter.requires_grad
                )
            owner._parameters[leaf] = placed[id(parameter)]  # type: ignore[assignment]
        for path, owner_module in model.named_modules():
            for leaf, buffer in owner_module._buffers.items():
                if buffer is not None:
                    name = f"{path}.{leaf}" if path else leaf
                    owner, _ = initialise.container(self, name)
                    if id(buffer) not in placed:
                        placed[id(buffer)] = initialise.same_everywhere(buffer.detach(), mesh, state.device)
                    owner._buffers[leaf] = placed[id(buffer)]
                    if leaf in owner_module._non_persistent_buffers_set:
                        owner._non_persistent_buffers_set.add(leaf)
        self.train(self.training)

    def _local_state(self, path: str, space: StrategySpace) -> torch.Tensor:
        if path in space.graph.constant_tensors:
            return space.graph.constant_tensors[path].to(self._state.device)
        owner, leaf = initialise.container(self, path)
        value = getattr(owner, leaf)
        if value.device.type == "meta":
            raise InputError(f"{path} is still on the meta device: call init_weights() or load_state_dict(...) first")
        return value.to_local() if isinstance(value, DTensor) else value

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
        return initialise.as_dtensor(value, self._state.mesh, layout, meta.shape)


@dataclass
class _State:
    """What the module keeps beside its parameters."""

    model: nn.Module
    mesh: DeviceMesh
    axes: Mapping[str, groups.Axis]
    compile_call: Compile

    def __post_init__(self) -> None:
        self.forms: dict[Any, Compiled] = {}
        self.layouts: dict[str, Layout] = {}
        self.calls = 0
        self.seed = initialise.shared_seed(torch.initial_seed())
        self.device = torch.device(self.mesh.device_type)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    return type(leaf).__name__, leaf if isinstance(leaf, (int, float, str, bool, type(None))) else repr(leaf)


def _as_plain(leaf: Any, device: torch.device) -> Any:
    """A DTensor as a tensor of its global shape, for tracing; of a meta-device model every tensor is a shape only."""
    if isinstance(leaf, DTensor) or (isinstance(leaf, torch.Tensor) and device.type == "meta"):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad)
    return leaf

