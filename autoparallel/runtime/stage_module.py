"""One pipeline stage's program as a module that runs per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from autoparallel.backends import EAGER, INDUCTOR, leaves_in_backward
from autoparallel.backends.compiled import Lowering, compiled
from autoparallel.backends.needed import note_reads, with_needed_gradients
from autoparallel.backends.parts import parts_of
from autoparallel.kernels import groups, rng
from autoparallel.kernels.async_communication import issue_gradients
from autoparallel.kernels.gathered_once import Kept, keeping
from autoparallel.kernels.groups import Axis
from autoparallel.kernels.numbers import call_numbers, use_numbers
from autoparallel.kernels.regather import regathering
from autoparallel.lower.emit import Program
from autoparallel.lower.expert_pass import overlap_experts
from autoparallel.lower.multi_copy_pass import in_copies
from autoparallel.lower.norm_kernels import norm_kernels
from autoparallel.lower.number_sums import sum_numbers_together
from autoparallel.lower.overlap_pass import ended_together, overlap
from autoparallel.lower.overlapped import activations_overlapped
from autoparallel.lower.parameter_reads import (
    SplitProgram,
    communicates,
    gathers_parameter,
    moves_parameter,
    reduced_together,
    repeats,
    split_reads,
)
from autoparallel.lower.pieces_pass import in_pieces
from autoparallel.lower.recompute_pass import gather_again, gather_once, gathers_of_stored, with_recompute
from autoparallel.plans import Hybrid
from autoparallel.runtime.offload.gradients import HostGradients
from autoparallel.runtime.scaler import scaled


def split_step(program: Program, hybrid: Hybrid, backend: str = EAGER) -> SplitProgram:
    """The program split into parameter reads and the part per micro-batch, the latter with prefetch, ZeRO-3 gathers and
    recompute as ``hybrid`` says (which a backend that compiles does by itself)."""
    split = split_reads(program, communicates if hybrid.reads_each else lambda node: False)
    values = len(split.reads.graph.output_node().args[0])  # type: ignore[arg-type]
    if backend != EAGER:
        return replace(split, micro_batch=compiled_by(backend, split.micro_batch, hybrid, hybrid.overlaps_each, values))
    micro_batch = split.micro_batch
    if hybrid.overlaps_each:
        micro_batch = overlap(micro_batch, hybrid, gathered_blocks(hybrid))
    micro_batch = activations_overlapped(norm_kernels(micro_batch), hybrid)
    if hybrid.copies > 1:
        micro_batch = in_copies(micro_batch, values, hybrid)
    return replace(split, micro_batch=_kept_less(micro_batch, hybrid))


#: A program of more blocks is compiled block by block, equal ones once, instead of as one graph.
WHOLE_UP_TO = 8


def in_blocks(program: GraphModule, hybrid: Hybrid) -> bool:
    """Whether a backend compiles a program block by block. Its parameters' communication then runs as under "eager",
    overlapped, between the compiled parts. (One graph would give all gradients at its end, and those that leave the
    device, or are stepped, during backward are to come earlier; so are saved tensors that leave.) Not where each
    parameter is gathered where it is read: that would cut blocks into many parts, and none would put off gradients of
    weights."""
    most = 0 if leaves_in_backward(hybrid) else WHOLE_UP_TO
    blocks = {node.meta.get("block") for node in program.graph.nodes} - {None}
    return len(blocks) > most and not hybrid.reads_alone


def compiled_by(backend: str, program: GraphModule, hybrid: Hybrid, overlaps: bool, shared: int | None = None
                ) -> GraphModule:
    """The program, compiled by a backend, with ZeRO-3 gathers and recompute as ``hybrid`` says; ``overlaps``: parameter
    communication is overlapped with compute. With ``shared``, as of `in_copies`, it runs per micro-batch, several at a
    time with multi-copy."""
    in_parts = in_blocks(program, hybrid)
    between = in_parts or hybrid.gathers_once    # parameters' communication runs between graphs
    program = sum_numbers_together(in_pieces(program, hybrid))
    if between and overlaps:
        program = overlap(program, hybrid, lambda node: node.meta.get("block") if in_parts else "all")
    program = overlap_experts(program, hybrid)
    if shared is not None and hybrid.copies > 1:
        program = in_copies(program, shared, hybrid, asynchronous=False, by_block=in_parts)
    how = Lowering(backend == INDUCTOR, hybrid.zero_stage == 3 and not between, hybrid.recompute,
                   _recomputed_run(hybrid), hybrid.bucket_bytes, hybrid.saved_on, hybrid.puts_off_weights,
                   hybrid.fusion)
    if between:
        program = _gathered_as(hybrid, program, gathers_parameter)
        together = hybrid.saved_on == "device"    # else blocks leave one by one
        made = compiled(program, how, parts_of(program.graph, in_parts, together))
    else:
        made = compiled(program, how)
    note_reads(program, made)
    return made


def _gathered_as(hybrid: Hybrid, module: GraphModule, again: Callable[[FxNode], bool]) -> GraphModule:
    """The program with gathers repeated in backward, those for which ``again`` is true too (ZeRO-3), or kept for the
    next micro-batches (ZeRO-2), as ``hybrid`` says."""
    if hybrid.zero_stage == 3:
        return gather_again(module, again)
    return gather_once(module, moves_parameter) if hybrid.gathers_once else module


def _kept_less(module: GraphModule, hybrid: Hybrid) -> GraphModule:
    """The program with gathers repeated or kept, and blocks recomputed in backward, as ``hybrid`` says."""
    module = _gathered_as(hybrid, module, repeats)
    if hybrid.recompute == "none":
        return module
    return with_recompute(module, hybrid.recompute, _recomputed_run(hybrid), hybrid.puts_off_weights, hybrid.saved_on)


def _recomputed_run(hybrid: Hybrid) -> Callable[[FxNode], object]:
    """Returns a function: node -> its block, if that is recomputed, else None; and its micro-batch, of several at a
    time that do not alternate within blocks."""
    block_of = _recomputed(hybrid)

    def run_of(node: FxNode) -> object:
        block = block_of(node)
        together = hybrid.alternates or "copy" not in node.meta
        return block if block is None or together else (block, node.meta["copy"])

    return run_of


def gathered_blocks(hybrid: Hybrid) -> Callable[[FxNode], str | None]:
    """Returns a function: node -> the block whose parameters are gathered together before it runs, or None: each one
    (`Hybrid.gathers_blocks`), or each recomputed one."""
    return (lambda node: node.meta.get("block")) if hybrid.gathers_blocks else _recomputed(hybrid)


def _recomputed(hybrid: Hybrid) -> Callable[[FxNode], str | None]:
    """Returns a function: node -> its block if that is recomputed, else None."""

    def block_of(node: FxNode) -> str | None:
        block: str | None = node.meta.get("block")
        return block if hybrid.recomputed(block) else None

    return block_of


class StageModule(nn.Module):
    """One stage's program, run per micro-batch: `begin`, then forward and backward of each, then `finish`.

    ``leaves``, its parameters, are the values that micro-batches read, made once per step from the model's parameters;
    gradients accumulate in them; or, reduced after each micro-batch, in host memory, by ``gradients``. ``loss``: number
    of the output that is the loss, on the last stage. ``shared``: parameters that other pipeline ranks have too.
    """

    def __init__(self, program: Program, loss: int | None, hybrid: Hybrid, axes: Mapping[str, Axis],
                 backend: str = EAGER, gradients: HostGradients | None = None, shared: Collection[str] = ()) -> None:
        super().__init__()
        self.gradients = gradients
        names = (decision.path for decision in program.placeholders if decision.kind == "parameter")
        self.names = [None if name in shared else name for name in names]
        self.on_host: dict[int, torch.Tensor] = {}
        self.program, self.loss, self.axes = program, loss, axes
        self.each_micro_batch, self.copies = hybrid.zero_stage >= 2, hybrid.copies
        self.sums_losses = hybrid.stages > 1 and hybrid.copies > 1
        self.is_compiled = backend != EAGER
        self.regathers = hybrid.zero_stage == 3 and (backend == EAGER or in_blocks(program.module, hybrid))
        split = split_step(program, hybrid, backend)
        self.bucket_bytes = hybrid.bucket_bytes
        self.reads = split.reads if hybrid.reads_each else overlap(split.reads, hybrid)
        self.reduced_together = [] if hybrid.reads_each else ended_together(self.reads)
        self.hooks: list[Any] = []
        self.reduced_at_once = reduced_together(split.reads) if hybrid.reads_each else []
        stored = split.reads.graph.output_node().args[0]
        self.kept, self.gathers = Kept(), gathers_of_stored(split.micro_batch, len(stored))  # type: ignore[arg-type]
        self.micro_batch: nn.Module = split.micro_batch if backend == EAGER else with_needed_gradients(
            split.micro_batch)
        self.received = self.copies * program.received
        outputs, _, _ = next(n for n in program.module.graph.nodes if n.op == "output").args[0]
        self.results = (outputs[loss],) if loss is not None else self.copies * program.sent
        self.sum_dtype = hybrid.sum_dtype
        self.leaves = nn.ParameterList()
        self.parameters_read: list[tuple[torch.Tensor, nn.Parameter]] = []
        self.updates: tuple[torch.Tensor, ...] = ()

    def begin(self, parameters: Sequence[torch.Tensor], inputs: Mapping[int, Sequence[torch.Tensor]], seed: int
              ) -> None:
        """Begin a step: read the parameters (local tensors). ``inputs``: micro-batch -> the other placeholders'
        tensors; ``seed``: of the step's random ops."""
        if (
            self.each_micro_batch
        ):  # reduced gradients accumulate in separate leaves, so that parameters' hooks run once, with the sum
            self.parameters_read = [(p, self._leaf(p)) for p in parameters]
            parameters = [leaf for _, leaf in self.parameters_read]
            for number, (leaf, name) in enumerate(zip(parameters, self.names, strict=True)):
                if leaf.requires_grad and self.gradients is not None and name and self.gradients.takes(name):
                    leaf.register_post_accumulate_grad_hook(partial(self._reduced, number))
        with groups.use(self.axes):
            self.values = self.reads(*parameters)
        self.inputs, self.seed, self.numbers = inputs, seed, call_numbers()
        self.leaves = nn.ParameterList(map(self._leaf, self.values))
        self.kept.clear()    # left by a step that failed
        with groups.use(self.axes), keeping(self.kept):
            self.gathers(*self.leaves)
        if self.each_micro_batch:
            for numbers in self.reduced_at_once:
                _reduce_now([(self.leaves[n], self.values[n]) for n in numbers if self.values[n].requires_grad])

    def _leaf(self, value: torch.Tensor) -> nn.Parameter:
        """A leaf on the same memory with a gradient of its own, in ``sum_dtype`` if that is more precise."""
        leaf = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
        if self.sum_dtype is not None and leaf.requires_grad:
            leaf.grad_dtype = torch.promote_types(leaf.dtype, self.sum_dtype)
        return leaf

    def forward(self, *received: torch.Tensor, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """Forward of a micro-batch, and with multi-copy of those after it that run at the same time: their losses
        (of a pipeline their sum, in float64: torch's schedule detaches one result), or the values to send.
        ``received``, and what is to be sent: of one micro-batch after the other."""
        numbers, of_each = range(micro_batch, micro_batch + self.copies), len(received) // self.copies
        values = [_Received.apply(x) for x in received]
        inputs = [x for at, number in enumerate(numbers)
                  for x in (*self.inputs[number], *values[at * of_each : (at + 1) * of_each])]
        with groups.use(self.axes), rng.use_seed(*(rng.mix(self.seed, number) for number in numbers)), \
                use_numbers(self.numbers), keeping(self.kept), \
                regathering(self.bucket_bytes) if self.regathers else nullcontext():
            results = self.micro_batch(*self.leaves, *inputs)
        copies = [results] if self.copies == 1 else results
        self.updates = copies[-1][1]
        if self.loss is not None:
            losses = tuple(_without_view(scaled(outputs[self.loss])) for outputs, *_ in copies)
            return (torch.stack([loss.double() for loss in losses]).sum(),) if self.sums_losses else losses
        return tuple(_Sent.apply(x) for *_, sent in copies for x in sent)

    def reduce_overlapped(self, is_first: bool) -> None:
        """For a backward that completes the gradients: launch each bucket's reduction once its last gradient arrives.
        (Expected are the gradients that earlier micro-batches had; all, if it ``is_first``.)"""
        expected = {n for n, leaf in enumerate(self.leaves)
                    if leaf.grad is not None or (is_first and leaf.requires_grad)}
        arrived = self._launching(expected)
        self.hooks = [self.leaves[n].register_post_accumulate_grad_hook(lambda _, n=n: arrived(n))
                      for numbers in self.reduced_together for n in numbers if n in expected]

    def reduce_weights_overlapped(self, expected: Collection[int]) -> Callable[..., None]:
        """The same for the second part of a backward, which sets the gradients of the ``expected`` leaves without
        hooks: to be called with their numbers as they arrive. Buckets that expect none are launched now."""
        arrived = self._launching(expected)
        for numbers in self.reduced_together:
            if not any(n in expected for n in numbers) and any(self.leaves[n].grad is not None for n in numbers):
                self._launch(numbers)
        return arrived

    def _launching(self, expected: Collection[int]) -> Callable[..., None]:
        """Returns a function that is told the numbers of gradients that arrive together, and launches, in order, the
        reductions of the buckets of which none of the ``expected`` is left."""
        left = [(numbers, {n for n in numbers if n in expected}) for numbers in self.reduced_together]

        def arrived(*arriving: int) -> None:
            for numbers, still in left:
                if not still.isdisjoint(arriving):
                    still.difference_update(arriving)
                    if not still:
                        self._launch(numbers)

        return arrived

    def _launch(self, numbers: Sequence[int]) -> None:
        """Launch the reduction of a bucket's gradients."""
        values = tuple(self.values[n] for n in numbers)
        issue_gradients(values, tuple(None if (made := self.leaves[n].grad) is None else made.to(value.dtype)
                                      for n, value in zip(numbers, values, strict=True)))

    def reduce_weights(self) -> None:
        """Reduce the gradients that a backward in parts left in the leaves, of ZeRO-2 and 3. (Its second part sets them
        without hooks.)"""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.each_micro_batch:
            _reduce_leaves(list(zip(self.leaves, self.values, strict=True)))

    def _reduced(self, number: int, leaf: torch.Tensor) -> None:
        """The gradient of parameter ``number`` is reduced: add it to what is on the host."""
        name = self.names[number]
        if self.gradients is not None and name is not None and leaf.grad is not None:
            self.on_host[number] = self.gradients.take(leaf.grad, self.on_host.get(number),
                                                       self.gradients.files_of(name))
            leaf.grad = None

    def _take_from_host(self) -> None:
        """Give the model's parameters the gradients that are on the host. Those with hooks of the user's, which want
        one of the device, get it through backward."""
        assert self.gradients is not None
        self.gradients.wait()
        self.gradients.note({str(self.names[number]): summed for number, summed in self.on_host.items()})
        while self.on_host:
            number, summed = self.on_host.popitem()
            (_, leaf), name = self.parameters_read[number], self.names[number]
            assert name is not None
            if self.gradients.has_hooks(name):
                leaf.grad = summed.to(leaf.device)
            else:
                self.gradients.give(name, summed)

    def finish(self) -> None:
        """End a step: reduce the remaining gradients and accumulate them in the model's parameters."""
        _pass_on(zip(self.values, self.leaves, strict=True))
        if self.on_host:
            self._take_from_host()
        _pass_on(self.parameters_read)
        self.values, self.inputs, self.leaves, self.parameters_read = (), {}, nn.ParameterList(), []
        self.kept.clear()


def _pass_on(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """For pairs (value, leaf), run backward of the value from the leaf's gradient."""
    found = [(value, leaf.grad.to(value.dtype)) for value, leaf in pairs if leaf.grad is not None]
    if found:
        torch.autograd.backward([value for value, _ in found], [gradient for _, gradient in found])


class _Received(torch.autograd.Function):
    """A value from the previous stage; its gradient, which is sent back, is made contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Sent(torch.autograd.Function):
    """A value for the next stage: contiguous and no view, since torch's zero-bubble schedule detaches a stage's results
    in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _without_view(loss: torch.Tensor) -> torch.Tensor:
    """The loss, which torch's zero-bubble schedule detaches in place."""
    made: torch.Tensor = _Sent.apply(loss) if loss._is_view() else loss
    return made


def _reduce_leaves(pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """For pairs (leaf, value), move the leaves' gradients through the backward of the values, which reduces them."""
    found = list[tuple[torch.Tensor, torch.Tensor]]()
    for leaf, value in pairs:
        if leaf.grad is not None:
            found.append((value, leaf.grad.to(value.dtype)))
            leaf.grad = None
    if found:
        torch.autograd.backward([value for value, _ in found], [grad for _, grad in found], retain_graph=True)


def _reduce_now(pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """For pairs (leaf, value), reduce the leaves' gradients in each backward: once all have arrived, or at its end
    those that have."""
    arrived = list[tuple[nn.Parameter, torch.Tensor]]()

    def reduce() -> None:
        some = tuple(arrived)
        arrived.clear()
        _reduce_leaves(some)

    def arrive(pair: tuple[nn.Parameter, torch.Tensor], _: torch.Tensor) -> None:
        if not arrived and len(pairs) > 1:
            torch.autograd.Variable._execution_engine.queue_callback(reduce)
        arrived.append(pair)
        if len(arrived) == len(pairs):
            reduce()

    for pair in pairs:
        pair[0].register_post_accumulate_grad_hook(partial(arrive, pair))
