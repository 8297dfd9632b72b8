"""Runs compiled calls on this rank: local inputs, the program, global outputs, buffer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from autoparallel.capture import OpGraph, Ref
from autoparallel.capture.passes import autocast
from autoparallel.errors import InputError
from autoparallel.kernels import groups, host_copies, rng
from autoparallel.kernels.numbers import use_numbers
from autoparallel.kernels.saved_on_disk import use_file
from autoparallel.layout import INVARIANT, Layout
from autoparallel.runtime import initialise, left_values, output_gradients
from autoparallel.runtime.form import Compiled
from autoparallel.runtime.interpret import values_of
from autoparallel.runtime.local_inputs import local_input
from autoparallel.runtime.placing import keep_states_away
from autoparallel.runtime.scaler import check_unscaled, scaled, watch_scale
from autoparallel.runtime.shared import SharedGradients
from autoparallel.runtime.state import State
from autoparallel.runtime.step import StepRunner, loss_of
from autoparallel.runtime.wrappers import refuse_checkpoint
from autoparallel.strategies.space import StrategySpace

_STEPS_EARLY = "the plan (step_in_backward=True)"


class Calls:
    """Calls of a parallel module. ``leaves``: a call's arguments, flattened."""

    def __init__(self, module: nn.Module, state: State) -> None:
        self.module, self._state = module, state
        self._runners: WeakKeyDictionary[Compiled, StepRunner] = WeakKeyDictionary()
        self._shared_gradients: WeakKeyDictionary[Compiled, SharedGradients] = WeakKeyDictionary()
        self._tables: dict[str, tuple[dict[str, Any], str]] = {}  # by dotted name, where a module has the tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        """Runners are not copied: they belong to this module's programs and are made on demand."""
        return Calls(deepcopy(self.module, memo), deepcopy(self._state, memo))

    def forward(self, compiled: Compiled, leaves: Sequence[Any], compared: bool) -> Any:
        """Forward of a form with one stage and one micro-batch; returns the original's output structure.

        ``compared``: ranks compare the gradients that plain outputs get.
        """
        state = self._state
        if compiled.draws:
            refuse_checkpoint()
        whole = state.gives_whole(self.module.training, compiled.micro.loss is not None)
        with state.together.call(), use_numbers({n: leaves[n] for n in compiled.numbers}):
            outputs = self._run(compiled, leaves)
            results = [
                value if layout is None else initialise.taking_any_gradient(self._global_output(
                    value, layout, compiled.space, number, whole and number not in compiled.cached))
                for number, (value, layout) in enumerate(zip(outputs, compiled.program.output_layouts, strict=True))
            ]
        for result in results if compared and state.position.whole.size() > 1 else ():
            if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
                output_gradients.compare(result, state.together)
        graph = compiled.space.graph
        left_values.keep(state, {(left.path, left.name): pytree.tree_unflatten(
            results[left.first : left.first + left.spec.num_leaves], left.spec) for left in graph.left})
        return pytree.tree_unflatten(results[: graph.out_spec.num_leaves], graph.out_spec)

    def modules(self, compiled: Compiled) -> Mapping[int, nn.Module]:
        """The modules that run a form's steps, by stage, after its first step."""
        return {0: compiled.by_ops} if compiled.plan.hybrid.is_plain else dict(self._runners[compiled].modules)

    def step(self, compiled: Compiled, leaves: Sequence[Any]) -> torch.Tensor:
        """Forward and backward; returns the loss, detached."""
        run = self._whole_step if compiled.plan.hybrid.is_plain else self._in_micro_batches
        with self._state.together.call(), use_numbers({n: leaves[n] for n in compiled.numbers}):
            return run(compiled, leaves)

    def _run(self, compiled: Compiled, leaves: Sequence[Any]) -> Sequence[Any]:
        """Forward of a form with one stage and one micro-batch; returns this rank's local outputs."""
        state, program, space = self._state, compiled.program, compiled.space
        self._watch_gradients()
        with groups.use(state.axes), state.together.beside():
            local = initialise.local_shards(
                [
                    local_input(leaves[int(decision.path)], state.mesh, layout, state.device)
                    if decision.kind == "input"
                    else self._state_of(decision.path, space.graph).clone()
                    if decision.path in program.updates  # backward reads the old value
                    else self._state_of(decision.path, space.graph)
                    for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
                ],
                # else each moves to the host, or is stepped there, as it comes
                together=state.host_gradients is None and not state.offload.in_backward,
            )
            seed = rng.mix(state.seed, state.calls)
            with rng.use_seed(seed), use_file(state.saved_file), autocast.without_autocast():
                outputs, updates, _ = compiled.forward(*local)
        for output in outputs if state.offload.in_backward else ():
            if output.requires_grad:
                output.register_hook(self._check_backward)
        state.calls += 1
        self._settle()
        self._update(program.updates, updates)
        return cast(Sequence[Any], outputs)

    def _whole_step(self, compiled: Compiled, leaves: Sequence[Any]) -> torch.Tensor:
        """A step of a form with one stage and one micro-batch."""
        loss = scaled(self._run(compiled, leaves)[loss_of(compiled.micro.loss)])
        if torch.is_grad_enabled():
            with autocast.without_autocast(), groups.use(self._state.axes):
                loss.backward()
                self._settle()
        return loss.detach()

    def _in_micro_batches(self, compiled: Compiled, leaves: Sequence[Any]) -> torch.Tensor:
        """A step in micro-batches or pipeline stages."""
        state, key = self._state, compiled
        self._watch_gradients()
        if key not in self._runners:
            own = {name: ranks for name, ranks in compiled.shared.items() if name in compiled.parameter_layouts}
            self._runners[key] = StepRunner(
                compiled.programs, compiled.micro.loss, compiled.plan.hybrid, state.axes, state.position.pipeline_group,
                state.device, compiled.backend, state.host_gradients, own,
            )
            hybrid = compiled.plan.hybrid
            self._shared_gradients[key] = SharedGradients(partial(initialise.registered, self.module), own,
                                                          state.shared_groups, hybrid.sum_dtype, hybrid.bucket_bytes)
        feeds = self._feeds(compiled, leaves)
        with self._one_backward(), self._shared_gradients[key].added_up() as shared, use_file(state.saved_file), \
                autocast.without_autocast():
            loss = self._runners[key].run(
                lambda program: initialise.local_shards(
                    [
                        shared[decision.path]
                        if decision.path in shared
                        else self._state_of(decision.path, compiled.space.graph)
                        for decision in program.placeholders
                        if decision.kind == "parameter"
                    ],
                    handed_over=True,
                ),
                lambda program, micro_batch: [
                    local_input(feeds[int(decision.path)][micro_batch], state.mesh, layout, state.device)
                    if decision.kind == "input"
                    else self._state_of(decision.path, compiled.space.graph)
                    for decision, layout in zip(program.placeholders, program.placeholder_layouts, strict=True)
                    if decision.kind != "parameter"
                ],
                rng.mix(state.seed, state.calls),
            )
        state.calls += 1
        self._settle()
        for module in self._runners[key].modules.values():
            self._update(module.program.updates, module.updates)
        self._share_written(compiled)
        of_model = compiled.micro.body.meta(compiled.micro.body.outputs[loss_of(compiled.micro.loss)]).dtype
        return loss if loss.dtype == of_model else loss.to(torch.promote_types(of_model, torch.float32))  # a pipeline's

    def _check_backward(self, _: torch.Tensor) -> None:
        """The hook of outputs, before backward computes with parameters."""
        check_unscaled(_STEPS_EARLY)
        for optimizer in self._state.optimizers:
            if (steps := optimizer.backward_steps) is not None:
                steps.check_backward()

    @contextmanager
    def _one_backward(self) -> Iterator[None]:
        """Within, what steps parameters on the device during backward takes calls of autograd for one backward."""
        with ExitStack() as entered:
            for optimizer in self._state.optimizers if self._state.offload.steps_there else ():
                entered.enter_context(optimizer.one_backward())
            yield

    def _settle(self) -> None:
        """Parameters on the host are not read any more."""
        if self._state.offload.moves_parameters:
            host_copies.settle()

    def _watch_gradients(self) -> None:
        if self._state.offload.in_backward:
            check_unscaled(_STEPS_EARLY)
            watch_scale()
        for optimizer in self._state.optimizers if self._state.offload.in_backward else ():
            optimizer.check_stepped("the module was called")
            if self._state.offload.steps_there:
                optimizer.watch()
        offload = self._state.offload
        if (offload.is_away or offload.in_backward) and not self._state.keeps_away:    # of a copy
            keep_states_away(self.module, self._state)
        if (gradients := self._state.host_gradients) is not None:
            gradients.watch(nn.Module.named_parameters(self.module, remove_duplicate=False))

    def _update(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():  # cloned first: a new value may alias another buffer's old one
            for name, value in zip(names, [value.clone() for value in values], strict=True):
                initialise.registered(self.module, name).copy_(value)

    def _share_written(self, compiled: Compiled) -> None:
        """Broadcast buffers that one pipeline stage wrote; other stages may read them in the next step."""
        if (group := self._state.position.pipeline_group) is not None:
            for name, rank in compiled.written.items():
                dist.broadcast(initialise.registered(self.module, name), dist.get_global_rank(group, rank), group=group)

    def _feeds(self, compiled: Compiled, leaves: Sequence[Any]) -> list[list[Any]]:
        """For each input of the micro-batch program, its value per micro-batch."""
        state, micro = self._state, compiled.micro
        if state.position.pipeline_ranks > 1:  # stages read whole inputs, whose rows are sharded over all stages
            leaves = [
                leaf.full_tensor() if isinstance(leaf, DTensor) and leaf.device_mesh == state.position.whole else leaf
                for leaf in leaves
            ]
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

    def _state_of(self, path: str, graph: OpGraph) -> torch.Tensor:
        """A parameter, buffer or constant tensor by its dotted name. Raises InputError on the meta device."""
        if path in graph.constant_tensors:
            return graph.constant_tensors[path].to(self._state.device)
        table, leaf = self._tables.get(path) or self._table(path)
        if leaf not in table:
            raise InputError(f"{path} is on other ranks of the pipeline, where the first call's stages read it, and "
                             "this call's stages are cut elsewhere\n  Make the first call one of those that follow, in "
                             "shapes and mode, or compile with a plan, autoparallel.compile(..., plan=...).")
        value: torch.Tensor = table[leaf]
        if value.is_meta:
            raise InputError(f"{path} is still on the meta device: call init_weights() or load_state_dict(...) first")
        return value

    def _table(self, path: str) -> tuple[dict[str, Any], str]:
        """The table of the module that has a parameter or buffer, and its name there. Found once: `Places` refuses
        other modules."""
        owner, leaf = initialise.container(self.module, path)
        found = cast(dict[str, Any], owner._parameters if leaf in owner._parameters else owner._buffers), leaf
        self._tables[path] = found
        return found

    def _global_output(self, value: torch.Tensor, layout: Layout, space: StrategySpace, number: int, whole: bool
                       ) -> torch.Tensor:
        if all(p == INVARIANT for p in layout):
            return value
        meta = space.graph.meta(space.graph.outputs[number])
        made = initialise.as_dtensor(value, self._state.mesh, layout, meta.shape)
        return _whole(made, value) if whole else made


def _whole(output: DTensor, local: torch.Tensor) -> torch.Tensor:
    """The whole of an output. What was gathered for it is new memory, which users may write to (``logits.div_(2)``);
    torch takes it for a view, of which it refuses that."""
    made = output.full_tensor()
    is_new = made.untyped_storage().data_ptr() != local.untyped_storage().data_ptr()
    return torch.ops.aten._unsafe_view.default(made, made.shape) if is_new else made
