"""Exchanges inside variants of ops: bytes and seconds; of a ring, the seconds of messages that its work does not hide.

A ring of n ranks (`kernels.ring`) has n rounds of equal work. Keys and values of the next round travel while one is
computed; in backward their gradients follow from the third round on, and once more after the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoparallel.rules.rule import Exchange
from cost_models import Group, collectives

RING, RING_GRADIENTS = "ring", "ring_gradients"


@dataclass(frozen=True)
class Inside:
    """An exchange inside a variant along a mesh axis, by strategy (0: not that variant): bytes of a message, its
    ``seconds``, and those by which all messages prolong the op, ``forward_s`` and ``backward_s``."""

    variant: str
    axis: int
    exchange: Exchange
    num_bytes: np.ndarray
    seconds: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray


def exchange_s(action: str, num_bytes: np.ndarray, group: Group) -> np.ndarray:
    """Seconds of an `Exchange` of that ``action``, of ``num_bytes`` per rank."""
    match action:
        case "all_reduce":
            return np.asarray(collectives.all_reduce_s(num_bytes, group))
        case "all_to_all":
            return np.asarray(collectives.all_to_all_s(num_bytes, group))
        case "all_gather":
            return np.asarray(collectives.all_gather_s(num_bytes * group.size, group))
        case "ring" | "ring_gradients":
            return (group.size - 1) * np.asarray(collectives.send_recv_s(num_bytes, group))
        case "neighbours":
            return np.asarray(collectives.send_recv_s(num_bytes, group))
    raise ValueError(f"unknown exchange {action!r}")


@dataclass(frozen=True)
class RingRounds:
    """By strategy, seconds of the messages of one round: of keys and values, and of their gradients. ``saves``: the
    share of overlapped seconds that overlap saves (2 - slowdown)."""

    ranks: int
    keys_s: np.ndarray
    gradients_s: np.ndarray
    saves: float

    def exposed_forward_s(self, work_s: np.ndarray) -> np.ndarray:
        """``work_s``: of all rounds, without messages."""
        return (self.ranks - 1) * self._exposed_s(self.keys_s, work_s)

    def exposed_backward_s(self, work_s: np.ndarray) -> np.ndarray:
        n, keys, gradients = self.ranks, self.keys_s, self.gradients_s
        rounds = (min(2, n - 1), keys), (max(0, n - 3), keys + gradients), (int(n > 2), gradients)
        return sum((count * self._exposed_s(sent, work_s) for count, sent in rounds), gradients)

    def _exposed_s(self, sent_s: np.ndarray, work_s: np.ndarray) -> np.ndarray:
        return np.asarray(sent_s - self.saves * np.minimum(sent_s, work_s / self.ranks))


def without_hidden(exchanges: Sequence[Inside], forward_s: np.ndarray, backward_s: np.ndarray,
                   mesh_shape: Sequence[int], saves: float) -> tuple[Inside, ...]:
    """The exchanges of an op that takes ``forward_s`` and ``backward_s`` without them; of rings' messages only the
    exposed seconds count, divided among them in proportion."""
    shares = {axis: _exposed_shares([x for x in exchanges if x.axis == axis], forward_s, backward_s, mesh_shape[axis],
                                    saves) for axis in {x.axis for x in exchanges if _is_of_ring(x)}}
    return tuple(replace(x, forward_s=shares[x.axis][0] * x.forward_s, backward_s=shares[x.axis][1] * x.backward_s)
                 if _is_of_ring(x) else x for x in exchanges)


def _is_of_ring(exchange: Inside) -> bool:
    return exchange.exchange.action in (RING, RING_GRADIENTS)


def _exposed_shares(of_axis: Sequence[Inside], forward_s: np.ndarray, backward_s: np.ndarray, ranks: int, saves: float
                    ) -> tuple[np.ndarray, np.ndarray]:
    """Of the seconds of a ring's messages, forward and backward, the shares that its rounds do not hide."""
    keys, gradients = (sum((x.seconds for x in of_axis if x.exchange.action == action), np.zeros(len(forward_s)))
                       for action in (RING, RING_GRADIENTS))
    rounds = RingRounds(ranks, keys / max(1, ranks - 1), gradients / max(1, ranks - 1), saves)
    return (_share(rounds.exposed_forward_s(forward_s), keys),
            _share(rounds.exposed_backward_s(backward_s), keys + gradients))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


__all__ = ["Inside", "RingRounds", "exchange_s", "without_hidden"]
