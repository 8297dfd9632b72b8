"""Mixtures of experts whose rows travel, in the parts in which they run (`schedule.expert_windows`), as tasks of the
simulator. Experts are taken to be chosen evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autoparallel.pricing.exchanges import Inside
from autoparallel.pricing.expert_rows import DISPATCH, sends_rows
from autoparallel.pricing.rank_reads import Message, RankReads, Timed
from autoparallel.pricing.step_cost import prices_of
from autoparallel.pricing.step_tasks import Label, StepTasks
from autoparallel.schedule.activation_windows import PRODUCTS
from autoparallel.schedule.expert_windows import ExpertWindow, expert_windows

#: `Message.action` of an all-to-all of rows, whose number depends on the data.
ROWS = "rows"


@dataclass(frozen=True)
class Mixture:
    """A mixture whose rows travel; seconds are those of all micro-batches of a step. ``numbers``: the exchange of how
    many rows go where; ``rows``, ``results``: all-to-alls (equal forward and backward); ``forward_s``, ``backward_s``:
    of the experts."""

    window: ExpertWindow
    numbers: Sequence[Timed]
    rows: Sequence[Timed]
    results: Sequence[Timed]
    forward_s: float
    backward_s: float

    @property
    def index(self) -> int:
        return self.window.mixture

    @property
    def parts_s(self) -> tuple[float, float]:
        """Seconds of all parts, forward and backward."""
        sent = sum(timed.seconds for timed in (*self.rows, *self.results))
        there = sum(timed.seconds for timed in self.numbers)
        return there + sent + self.forward_s, (sent if self.backward_s else 0.0) + self.backward_s


class MixtureAction(NamedTuple):
    """A part of a mixture: rows are sent, experts compute, results are taken."""

    part: Literal["send", "run", "take"]
    mixture: Mixture


class RunningMixtures:
    """Runs parts of mixtures, of one of ``count`` equal micro-batches, as tasks of ``step``. ``label``: what
    all-to-alls are called; ``compute``: what the experts' compute is."""

    def __init__(self, step: StepTasks, count: float, label: str, compute: str) -> None:
        self.step, self.count, self.label, self.compute = step, count, label, compute
        self._pending: dict[int, list[int]] = {}

    def forward(self, action: MixtureAction) -> None:
        part, one = action
        if part == "send":
            for timed in one.numbers:
                self.step.run(timed.per(self.count), self._label(one))
            self._issue(one, one.rows)
        elif part == "run":
            self._wait(one)
            self.step.compute(one.forward_s / self.count, (self.compute, one.index, one.index))
            self._issue(one, one.results)
        else:
            self._wait(one)

    def backward(self, action: MixtureAction, reads: Callable[[int], None]) -> None:
        """``reads`` is called before the experts' backward."""
        part, one = action
        if not one.backward_s:
            return
        if part == "take":
            self._issue(one, one.results)
        elif part == "run":
            self._wait(one)
            reads(one.index)
            self.step.compute(one.backward_s / self.count, (self.compute, one.index, one.index))
            self._issue(one, one.rows)
        else:
            self._wait(one)

    def _issue(self, one: Mixture, sent: Sequence[Timed]) -> None:
        self._pending[one.index] = [self.step.issue([timed.per(self.count)], self._label(one)) for timed in sent]

    def _wait(self, one: Mixture) -> None:
        self.step.wait(self._pending.pop(one.index))

    def _label(self, one: Mixture) -> Label:
        return self.label, one.index, one.index


def mixtures_of(reads: RankReads) -> list[Mixture]:
    """The mixtures of a plan on a rank whose rows travel."""
    space, hybrid = reads.space, reads.counts.hybrid
    found = list[tuple[int, int]]()
    for index in reads.members:
        s = space.strategy_sets[index]
        if space.decisions[index].kind == "op" and sends_rows(s) and any(
                s.axis_strategies[r].variant == DISPATCH for r in s.array[reads.numbers[index]].tolist()):
            found.append((index, _reader(reads, index)))
    products = [index for index in reads.members if (rule := space.strategy_sets[index].rule) is not None
                and rule.op_class in PRODUCTS] if found else []
    return [_mixture(reads, window) for window in expert_windows(found, products, space.blocks.__getitem__, hybrid)]


def _reader(reads: RankReads, index: int) -> int:
    """The first decision whose steps or op read a mixture's result (itself: none here)."""
    moved = {move.use.target for move in reads.moves if move.use.source == index and move.path}
    readers = [target if target in moved else reads.first_reader(target)
               for target in reads.space.readers_of.get(index, ()) if reads.here[target]]
    return min((reader for reader in readers if reader in moved or reads.space.decisions[reader].kind == "op"),
               default=index)


def _mixture(reads: RankReads, window: ExpertWindow) -> Mixture:
    index, number = window.mixture, int(reads.numbers[window.mixture])
    price = prices_of(reads.pricer.prices, reads.counts, index, reads.stage).op_of(index)
    inside = [one for one in price.inside if one.variant == DISPATCH and one.seconds[number]]
    times = reads.counts.op_times(index, reads.stage)[1]
    fixed, moved = ([_timed(reads, one, number, times) for one in inside if one.exchange.fixed == is_fixed]
                    for is_fixed in (True, False))
    cost, sent = reads.pricer.costs.of(index, reads.stage), sum(timed.seconds for timed in moved)
    forward_s = float(cost.forward[number]) - sent - sum(timed.seconds for timed in fixed)
    backward_s = float(cost.backward[number])
    return Mixture(window, fixed, moved[:-1], moved[-1:], forward_s, backward_s - sent if backward_s else 0.0)


def _timed(reads: RankReads, inside: Inside, number: int, times: int) -> Timed:
    axis, exchange = reads.space.axis_names[inside.axis], inside.exchange
    message = Message(exchange.action if exchange.fixed else ROWS, axis, float(inside.num_bytes[number]))
    return Timed(times * float(inside.seconds[number]), reads.stream_of((inside.axis,)), message)


__all__ = ["ROWS", "Mixture", "MixtureAction", "RunningMixtures", "mixtures_of"]
