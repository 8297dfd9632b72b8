"""Schedules of torch.distributed.pipelining over our stage modules. (The one file that touches that package.)

Differences from torch's use:
- Shapes of exchanged tensors come from the plan, and micro-batches are cut by us: no inference, no chunking.
- Receive buffers are allocated per micro-batch from receiving to backward, not all before the first step.
- torch numbers a rank's micro-batches among those that it runs, and maps a stage to one rank. For a stage replicated on
  several ranks, the peer depends on the micro-batch.
- With several stages per rank torch keeps sent tensors until the step ends; here they are freed once their receiver has
  certainly asked for them (`received_by`).
- Schedules that split backward in two (zero bubble) use `backward_of_inputs` for the first part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining as torch_pp
from torch.distributed.pipelining import _backward as torch_backward
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import InferenceMode

from autoparallel.backends.two_parts import putting_off
from autoparallel.errors import LaunchError
from autoparallel.kernels.groups import sends
from autoparallel.plans import Hybrid
from autoparallel.schedule.in_flight import in_flight
from autoparallel.schedule.step_config import as_rounds
from cost_models.pipeline import order

if TYPE_CHECKING:
    from autoparallel.runtime.stage_module import StageModule


def _loss(output: Any, target: Any) -> torch.Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


class _Sends(list[dist.P2POp]):
    """Sends; ``sends + receives``, which torch issues together, puts the receives first. Over gloo the "ready to
    receive" message queues behind a send that has begun, and the two transfers would not overlap."""

    def __add__(self, receives: list[dist.P2POp]) -> list[dist.P2POp]:  # type: ignore[override]
        return [*receives, *self]


class _Stage(torch_pp.PipelineStage):
    """A stage whose receive buffers are on the meta device, except those of micro-batches in flight."""

    def __init__(self, module: StageModule, index: int, hybrid: Hybrid, device: torch.device, group: dist.ProcessGroup
                 ) -> None:
        # torch requires at least as many stages as ranks
        super().__init__(module, index, max(hybrid.stages, hybrid.pipeline_ranks), device,
                         input_args=_metas(module.received), output_args=_metas(module.results), group=group)
        self.module, self.num_stages = module, hybrid.stages
        self.hybrid, self.micro_batches, self.micro_batch = hybrid, hybrid.micro_batches_of(self.group_rank), 0
        self.backwards = 0

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.hybrid.rank_of(stage_idx, self.micro_batch))

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._on_meta():
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta():
            super()._setup_backward_recv_info(num_microbatches)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    @staticmethod
    def _move(infos: Sequence[Any], device: torch.device | str) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=False)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.args_recv_info[fwd_chunk_id], self.device)
        self.micro_batch = self.micro_batches[fwd_chunk_id]
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        self.micro_batch = self.micro_batches[bwd_chunk_id]
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self.micro_batch = self.micro_batches[fwd_chunk_id]
        return _Sends(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self.micro_batch = self.micro_batches[bwd_chunk_id]
        return _Sends(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._move(self.args_recv_info[fwd_chunk_id], "meta")  # autograd keeps the real buffer for backward
        return result

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
                                   ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        if self.module.is_compiled and backward_type == "input":
            return compiled_backward_of_inputs(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"],
                                               bwd_kwargs["input_values"])
        if self.module.is_compiled and backward_type == "weight":
            compiled_backward_of_weights(self.module, bwd_kwargs["param_groups"], self._reduces_now)
            return (), None
        if backward_type == "input":
            return backward_of_inputs(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"],
                                      bwd_kwargs["input_values"], list(self.submod.parameters()))
        if backward_type == "weight":
            backward_of_weights(self.module, bwd_kwargs["param_groups"], self._reduces_now)
            return (), None
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.backwards = 0

    @property
    def _reduces_now(self) -> bool:
        """Whether the second part of a backward completes gradients that are reduced."""
        return self.module.each_micro_batch or self.backwards == len(self.micro_batches)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if not self.hybrid.puts_off_weights:
            self.backwards += 1
            if self.backwards == len(self.micro_batches):
                self.module.reduce_overlapped(len(self.micro_batches) == 1)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._move(self.grad_recv_info.get(bwd_chunk_id, ()), "meta")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self.backwards += 1
        if self.is_first and self._reduces_now:    # its second part is all of backward
            self.module.reduce_overlapped(self.module.each_micro_batch or len(self.micro_batches) == 1)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.module.reduce_weights()


#: (computation or communication in torch's letters, stage, micro-batch)
Action = tuple[str, int, int]


class _SendingStage(_Stage):
    """A stage that issues its own sends and keeps sent tensors only until they are received.

    ``received_by``: computation -> sends of the rank that are complete when it begins; ``sent``: the rank's pending
    sends.
    """

    received_by: Mapping[Action, Sequence[Action]]
    sent: dict[Action, list[dist.Work]]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("SEND_F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("SEND_B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, what: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent[what, self.stage_index, self.micro_batches[chunk]] = torch_schedules._batch_p2p(ops)
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._let_go("F", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._let_go("B", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _let_go(self, what: str, chunk: int) -> None:
        for send in self.received_by.get((what, self.stage_index, self.micro_batches[chunk]), ()):
            torch_schedules._wait_batch_p2p(self.sent.pop(send))


def received_by(orders: Mapping[int, Sequence[Any]], own: int) -> dict[Action, list[Action]]:
    """For each computation of rank ``own``, its sends that are complete by then: the computation reads a tensor that
    their receiver sent after it had asked for them. Waiting for these is free; waiting for others could deadlock.

    ``orders``: torch's actions of each rank, with sends and receives. B is any backward that gives input gradients.
    """
    plain = {rank: [_plain(action) for action in order] for rank, order in orders.items()}
    positions = {action: (rank, n) for rank, order in plain.items() for n, action in enumerate(order)}
    heard: dict[int, int] = {}  # rank -> its last action that this rank knows to have begun
    pending, found = list[Action](), dict[Action, list[Action]]()
    for action in plain[own]:
        if action[0].startswith("SEND"):
            pending.append(action)
        elif action[0] in "FB":
            what, stage, micro_batch = action
            rank, n = positions.get((f"SEND_{what}", stage + (1 if what == "B" else -1), micro_batch), (own, -1))
            heard[rank] = max(heard.get(rank, -1), n)
            found[action] = [send for send in pending if _asked(positions, heard, send)]
            pending = [send for send in pending if send not in found[action]]
    return found


def _plain(action: Any) -> Action:
    what = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B"}.get(action.computation_type.name)
    return what or action.computation_type.name, action.stage_index, action.microbatch_index


def _asked(positions: Mapping[Action, tuple[int, int]], heard: Mapping[int, int], send: Action) -> bool:
    """Whether the receiver of a send is known to have issued its receive."""
    what, stage, micro_batch = send
    rank, n = positions[what.replace("SEND", "RECV"), stage + (1 if what == "SEND_F" else -1), micro_batch]
    return heard.get(rank, -1) >= n


def backward_of_inputs(outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor | None] | None,
                       inputs: Sequence[Any], weights: Sequence[torch.Tensor]
                       ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]]]:
    """(gradient of each input, None without; groups of weights whose gradients are computed later, in the form that
    torch's `stage_backward_weight` takes). First part of a split backward.

    A weight is put off if its gradient path meets the inputs' paths in exactly one autograd node; a group has one such
    node. Gradients of other weights are computed now: torch's own grouping (2.13) loses weights that meet no input
    path, and for weights that meet several nodes it may add a gradient twice or free buffers of the next group.
    """
    gives = [(o, torch.ones_like(o) if output_grads is None else output_grads[i])
             for i, o in enumerate(outputs) if o.requires_grad]
    takes = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    now, later = _split([o for o, _ in gives], takes, weights) if gives else ([], {})
    groups = [{"params": params, "intermediates": [node], "grads": [()]} for node, params in later.items()]
    handles = [group["intermediates"][0].register_prehook(_kept_in(group)) for group in groups]
    try:
        wanted = [*takes, *now] if gives else []
        made = iter(torch.autograd.grad([o for o, _ in gives], wanted, [g for _, g in gives],
                                        retain_graph=bool(groups), allow_unused=True) if wanted else ())
    finally:
        for handle in handles:
            handle.remove()
    found = tuple(next(made, None) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs)
    for weight, gradient in zip(now, made, strict=True):
        if gradient is not None:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    for output in outputs:
        output.detach_()
    return found, groups


def backward_of_weights(module: StageModule, groups: Sequence[dict[str, Any]], reduces: bool) -> None:
    """Second part of a split backward: the gradients of weights, group by group. ``reduces``: the reductions of those
    that are complete are launched meanwhile."""
    weights = list(module.leaves)
    numbers = {_node(weight): number for number, weight in enumerate(weights) if weight.requires_grad}
    nodes = [list(group["params"]) for group in groups]
    expected = {numbers[node] for some in nodes for node in some} if reduces else set()
    arrived = module.reduce_weights_overlapped(expected) if reduces else lambda *_: None
    for group, some in zip(groups, nodes, strict=True):
        torch_backward.stage_backward_weight(iter(weights), [group])
        arrived(*(numbers[node] for node in some))


def compiled_backward_of_inputs(outputs: Sequence[torch.Tensor], output_grads: Sequence[torch.Tensor | None] | None,
                                inputs: Sequence[Any]) -> tuple[tuple[torch.Tensor | None, ...], list[Any]]:
    """`backward_of_inputs` of a compiled stage, whose graphs put off the gradients of weights themselves. In place of
    groups it returns what `two_parts.putting_off` left."""
    takes = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    gives = [(o, torch.ones_like(o) if output_grads is None else output_grads[i])
             for i, o in enumerate(outputs) if o.requires_grad]
    with putting_off() as put_off:
        if gives:
            torch.autograd.backward([o for o, _ in gives], [g for _, g in gives])
    found = tuple(x.grad if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs)
    for x in takes:
        x.grad = None
    for output in outputs:
        output.detach_()
    return found, put_off.later


def compiled_backward_of_weights(module: StageModule, later: Sequence[Any], reduces: bool) -> None:
    """`backward_of_weights` of a compiled stage."""
    numbers = {id(leaf): number for number, leaf in enumerate(module.leaves)}
    last = {numbers[id(weight)]: part for part, (weights, _) in enumerate(later) for weight in weights}
    arrived = module.reduce_weights_overlapped(last) if reduces else lambda *_: None
    for part, (weights, gradients) in enumerate(later):
        for weight, gradient in zip(weights, gradients(), strict=True):
            summed = gradient.to(weight.grad_dtype or gradient.dtype)
            weight.grad = summed if weight.grad is None else weight.grad + summed
        arrived(*(number for number, final in last.items() if final == part))


def _split(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
           ) -> tuple[list[torch.Tensor], dict[Any, list[Any]]]:
    """(weights whose gradients are computed now; autograd node -> weights, as nodes, whose gradients start there)."""
    roots = [_node(output) for output in outputs]
    upwards = torch_backward.construct_reverse_graph(roots)
    paths, _ = torch_backward.reverse_closure([_node(x) for x in inputs], set(), upwards)
    now: list[torch.Tensor] = []
    later: dict[Any, list[Any]] = {}
    for weight in weights:
        if weight.requires_grad:
            end = _node(weight)
            own, met = torch_backward.reverse_closure([end], paths, upwards)
            if len(met) == 1 and own.isdisjoint(roots):
                later.setdefault(met.pop(), []).append(end)
            else:
                now.append(weight)
    return now, later


def _node(tensor: torch.Tensor) -> Any:
    """The autograd node of a tensor: its grad_fn, or a leaf's gradient accumulator."""
    return torch_backward._get_grad_fn_or_grad_acc(tensor)


def _kept_in(group: dict[str, Any]) -> Any:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        group["grads"][0] = gradients

    return keep


def with_messages(hybrid: Hybrid) -> dict[int, list[Any]]:
    """The actions of each rank, with sends and receives, for a pipeline with stages on several ranks.

    A send and its receive enter both ranks' lists at the same time. All lists follow one global order, in which no
    action waits for a later one, so there is no deadlock.
    """
    stage_of = {rank: stage for stage in range(hybrid.stages) for rank in hybrid.ranks_of(stage)}
    left = {
        rank: deque(order(in_flight(hybrid, stage), hybrid.micro_batches_of(rank))) for rank, stage in stage_of.items()
    }
    made: dict[int, list[tuple[str, int]]] = {rank: [] for rank in left}
    while any(left.values()):
        before = sum(map(len, left.values()))
        for rank, actions in left.items():
            if actions:
                (kind, micro_batch), stage = actions[0], stage_of[rank]
                comes_from, goes_to = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
                if 0 <= comes_from < hybrid.stages and (f"RECV_{kind}", micro_batch) not in made[rank]:
                    continue
                made[rank].append(actions.popleft())
                if 0 <= goes_to < hybrid.stages:
                    made[rank].append((f"SEND_{kind}", micro_batch))
                    made[hybrid.rank_of(goes_to, micro_batch)].append((f"RECV_{kind}", micro_batch))
        assert sum(map(len, left.values())) < before, "each waits for another"
    kinds = torch_schedules._ComputationType
    return {
        rank: [
            torch_schedules._Action(stage_of[rank], kinds.from_str(kind), micro_batch) for kind, micro_batch in actions
        ]
        for rank, actions in made.items()
    }


class _InMicroBatches(torch_schedules._PipelineScheduleRuntime):
    """The micro-batches of one rank of a stage that several ranks run."""

    def __init__(self, stage: _Stage, orders: Mapping[int, Sequence[Any]]) -> None:
        super().__init__([stage], len(stage.micro_batches), loss_fn=_loss, scale_grads=False)
        self.pipeline_order_with_comms = {
            self.rank: [
                action._replace(microbatch_index=stage.micro_batches.index(action.microbatch_index))
                for action in orders[self.rank]
            ]
        }

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:  # torch would exchange shapes between one rank of each stage
            stage._inference_mode = InferenceMode.STATIC


class Pipeline:
    """Runs this rank's stages in the order of the pipeline schedule of ``step``, whose rounds (`as_rounds`) are torch's
    micro-batches.

    ``modules``: this rank's stages by stage index, equally many on each rank; ``group``: process group of the pipeline
    axis.
    """

    def __init__(self, step: Hybrid, modules: Mapping[int, StageModule], group: dist.ProcessGroup,
                 device: torch.device) -> None:
        if not sends(group, device):
            raise LaunchError(f"pipeline stages send tensors on {device}, and the process group is gloo's, which sends "
                              "memory of the CPU only: start it with backend='cpu:gloo,cuda:nccl', as "
                              "autoparallel.init() does, and a GPU for each rank")
        hybrid, how = as_rounds(step), step.pipelining
        self.group, self.device, self.copies = group, device, step.copies
        kind = _SendingStage if hybrid.replicas or how.several_stages else _Stage
        self.stages = [kind(module, index, hybrid, device, group) for index, module in sorted(modules.items())]
        orders: Mapping[int, Sequence[Any]] = {}
        if hybrid.replicas:
            orders = with_messages(hybrid)
            self.schedule = _InMicroBatches(self.stages[0], orders)
        else:
            self.schedule = getattr(torch_pp, how.torch_class)(
                self.stages if kind is _SendingStage else self.stages[0], hybrid.micro_batches, loss_fn=_loss,
                scale_grads=False)
        self.sent: dict[Action, list[dist.Work]] = {}
        if kind is _SendingStage:
            done = received_by(orders or self.schedule.pipeline_order_with_comms, dist.get_rank(group))
            for stage in self.stages:
                assert isinstance(stage, _SendingStage)
                stage.received_by, stage.sent = done, self.sent

    def run(self) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the sum of their losses (float64) on every rank."""
        for stage in self.stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self.sent.clear()  # left by a step that failed
        losses: list[torch.Tensor] = []
        micro_batches: list[Any] = [{"micro_batch": number * self.copies} for number in self.stages[0].micro_batches]
        self.schedule._step_microbatches(
            [()] * len(micro_batches), micro_batches, [None] * len(micro_batches), losses, return_outputs=False
        )
        while self.sent:
            torch_schedules._wait_batch_p2p(self.sent.popitem()[1])
        last = any(stage.is_last for stage in self.stages)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if last:
            total += torch.stack(losses).detach().double().sum()
        dist.all_reduce(total, group=self.group)
        return total


def _metas(nodes: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(node.meta["val"].clone().requires_grad_(node.meta["global_meta"].requires_grad) for node in nodes)
