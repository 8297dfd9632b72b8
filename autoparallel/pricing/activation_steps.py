"""The redistributions of activations of one micro-batch in the order of a rank's program, with the async windows in
which some of them overlap with compute (`schedule.activation_windows`), as tasks of the simulator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from autoparallel.pricing.expert_exchanges import Mixture, MixtureAction, RunningMixtures, mixtures_of
from autoparallel.pricing.number_sums import NumberSums, StepKey
from autoparallel.pricing.pieced_products import PiecedStep, pieced_step
from autoparallel.pricing.rank_reads import RankReads, Timed, TimedStep
from autoparallel.pricing.redistribution_costs import PricedStep
from autoparallel.pricing.step_tasks import Label, StepTasks
from autoparallel.schedule.activation_windows import (
    NOWHERE,
    PRODUCTS,
    Travel,
    Window,
    activation_windows,
    overlaps_activations,
)
from autoparallel.schedule.pieces import Candidate, cut_of, gathers, pieced_products, reduces, runs_in_pieces
from autoparallel.strategies.space import TensorUse


class Action(NamedTuple):
    """A step that runs at once; or the launch or the wait of window ``number`` (in backward the other way round).
    ``sums``: of single numbers before it in one message, in forward; backward runs each by itself."""

    kind: Literal["run", "launch", "wait"]
    timed: TimedStep
    number: int = NOWHERE
    sums: Sequence[TimedStep] = ()


class _Path(NamedTuple):
    """The steps of a use, and what is known of each; ``sent``: the number of the last one that communicates (`NOWHERE`:
    none does)."""

    use: TensorUse
    steps: Sequence[TimedStep]
    priced: Sequence[PricedStep]
    sent: int


class ActivationSteps:
    """``ahead``: by decision, the actions before all that belongs to it; ``before``: those before its op, behind what
    it reads of parameters; ``put_off``: linear layers whose weights' gradients come later -> the decision after whose
    backward they are computed; ``shared``: shared reads with a window -> their first reader; ``pieced``: by decision at
    which they run, layers in pieces; ``mixtures``: by decision, mixtures of experts in parts. ``applies``: whether the
    program has windows and pieces; else all steps run at once."""

    def __init__(self, reads: RankReads, applies: bool) -> None:
        self.reads, self.space, self.counts = reads, reads.space, reads.counts
        self.ahead: Mapping[int, Sequence[Action | MixtureAction]] = {}
        self.put_off: Mapping[int, int] = {}
        self.shared: Mapping[int, int] = {}
        self.windows: Sequence[Window] = ()
        self.pieced: Mapping[int, PiecedStep] = {}
        self.mixtures: Mapping[int, Mixture] = {one.index: one for one in mixtures_of(reads)} if applies else {}
        if not (applies and overlaps_activations(self.counts.hybrid)):
            self.before: Mapping[int, Sequence[Action | MixtureAction]] = runs(reads.sent)
            return
        self._paths = [_path(move.use, reads.timed_steps(move), move.path) for move in reads.moves
                       if move.path and not self.counts.of_parameter[move.use.source]]
        self._path_of = {(path.use.target, path.use.position): path for path in self._paths}
        self._travelling = [path for path in self._paths if path.sent != NOWHERE]
        self._travels = self._with_layers()
        if runs_in_pieces(self.counts.hybrid):
            self._take_pieces()
        products = [index for index in reads.members if (rule := self.space.strategy_sets[index].rule) is not None
                    and rule.op_class in PRODUCTS]
        self.windows = activation_windows(self._travels, products, self.space.blocks.__getitem__, self.counts.hybrid)
        self.put_off = {layer: self._travels[window.number].reader
                        for window in self.windows for layer in window.put_off}
        travels = [self._travels[window.number] for window in self.windows]
        self.shared = {travel.target: travel.reader for travel in travels if travel.reader != travel.target}
        self.ahead, self.before = self._actions()

    def _take_pieces(self) -> None:
        """Set `pieced`; its steps are no longer among those of paths."""
        found, place_of = dict[int, PiecedStep](), {id(path): at for at, path in enumerate(self._paths)}
        some = [(n, one) for n in range(len(self._travels)) if (one := self._candidate(n)) is not None]
        for made in pieced_products([candidate for _, candidate in some], self.space.blocks.__getitem__):
            path, travel = self._travelling[(n := some[made.number][0])], self._travels[n]
            place = made.layers[0] if made.behind else travel.reader
            found[place] = pieced_step(self.reads, path.use, path.priced[path.sent], path.steps[path.sent], made, place)
            steps, priced = ([*one[: path.sent], *one[path.sent + 1 :]] for one in (path.steps, path.priced))
            self._paths[place_of[id(path)]] = path._replace(steps=steps, priced=priced, sent=NOWHERE)
        self.pieced = found
        self._travelling = [path for path in self._paths if path.sent != NOWHERE]
        self._travels = self._with_layers()

    def _candidate(self, number: int) -> Candidate | None:
        """A travel whose layers may run in pieces (as `lower.pieces_pass` finds it in the program)."""
        path, travel = self._travelling[number], self._travels[number]
        use, (priced, *_) = path.use, path.priced[path.sent :]
        if sum(_sends(timed) for timed in path.steps) != 1 or not use.meta.requires_grad:
            return None
        cut = cut_of(use.meta.shape, priced.step, self.space.mesh_shape, self.counts.hybrid.pieces)
        if cut is None:
            return None
        readers = self.space.readers_of.get(use.target, ()) if self._is_shared(path) else (use.target,)
        reads = path.sent == len(path.steps) - 1 and gathers(priced.step) and readers == travel.products and not any(
            (reader, self.space.uses_by[reader][0].position) in self._path_of for reader in readers if
            reader != use.target)
        makes = path.sent == 0 and reduces(priced.step) and travel.source == use.source and len(
            self.space.readers_of[use.source]) == 1 and self._is_layer(use.source, self.space.uses_by[use.source])
        return Candidate(use.target, cut, travel.products if reads else (), use.source if makes else NOWHERE)

    @cached_property
    def in_pieces(self) -> Mapping[int, int]:
        """The layers that run in pieces -> the decision at which they do."""
        return {layer: place for place, one in self.pieced.items() for layer in one.layers}

    @cached_property
    def late(self) -> Mapping[int, int]:
        """The decisions whose parameters' gradients backward makes elsewhere -> the decision after whose backward."""
        mixtures = {index: one.window.behind + one.window.is_open for index, one in self.mixtures.items()}
        return {**self.in_pieces, **self.put_off, **mixtures}

    @property
    def experts_at(self) -> Mapping[int, int]:
        """Mixtures whose experts compute later -> the decision behind which they do."""
        return {index: one.window.behind for index, one in self.mixtures.items() if one.window.is_open}

    @property
    def overlaps(self) -> bool:
        """Whether communication of activations overlaps with compute, but for layers in pieces."""
        return bool(self.windows) or any(one.window.is_open for one in self.mixtures.values())

    def _with_layers(self) -> list[Travel]:
        """The travels of all paths that communicate, with the linear layers that can put gradients off."""
        found = list[Travel]()
        layers, shared = defaultdict[int, list[int]](list), {path.use.target: n for n, path in
                                                             enumerate(self._travelling) if self._is_shared(path)}
        number = {(path.use.target, path.use.position): n for n, path in enumerate(self._travelling)}
        readers = [self.reads.first_reader(path.use.target) for path in self._travelling]
        in_pieces = {layer for one in self.pieced.values() for layer in one.layers}
        for index in self.reads.members:
            if not (uses := self.space.uses_by.get(index)) or index in in_pieces or not self._is_layer(index, uses):
                continue
            own = number.get((index, uses[0].position))
            if own is None or self._last_back(self._travelling[own]) == NOWHERE:
                own = shared.get(uses[0].source)
            if own is not None and self._last_back(path := self._travelling[own]) == path.sent and all(
                    self._is_there(use, path, readers[own]) for use in uses[1:]):
                layers[own].append(index)
        for n, path in enumerate(self._travelling):
            found.append(Travel(self._source(path.use), path.use.target, readers[n], tuple(layers[n])))
        return found

    def _is_shared(self, path: _Path) -> bool:
        return self.space.decisions[path.use.target].kind == "shared_read"

    @staticmethod
    def _last_back(path: _Path) -> int:
        """The number of the last step whose gradient communicates."""
        return max((n for n, timed in enumerate(path.steps) if timed.backward.message is not None), default=NOWHERE)

    def _source(self, use: TensorUse) -> int:
        """The op here that makes the value that a use redistributes, or `NOWHERE`."""
        decision = self._made_by(use.source)
        if decision in self.mixtures and self.mixtures[decision].window.is_open:
            return NOWHERE    # made where it is read
        is_op = self.space.decisions[decision].kind == "op"
        return decision if is_op and self.reads.here[decision] and not self.counts.crosses(use) else NOWHERE

    def _made_by(self, decision: int) -> int:
        """A decision, or what a shared read passes on as it is."""
        if self.space.decisions[decision].kind == "shared_read" and (decision, 0) not in self._path_of:
            return self._made_by(self.space.uses_by[decision][0].source)
        return decision

    def _is_layer(self, index: int, uses: Sequence[TensorUse]) -> bool:
        """Whether a decision is a linear layer on shards, with gradients of all operands."""
        decision, s = self.space.decisions[index], self.space.strategy_sets[index]
        if decision.kind != "op" or self.space.graph.nodes[decision.node].target is not torch.ops.aten.linear.default:
            return False
        chosen = s.array[self.reads.numbers[index]].tolist()
        return all(use.meta.requires_grad for use in uses) and not any(s.axis_strategies[r].variant for r in chosen)

    def _is_there(self, use: TensorUse, path: _Path, reader: int) -> bool:
        """Whether a layer's parameter is there where the result of ``path`` is first read."""
        if self.counts.of_parameter[use.source]:
            last = self.reads.last_step.get((use.target, use.position))
            return not self.reads.equivalent or last is None or self._read_at[last] <= reader
        source = self._made_by(use.source)
        if not self.counts.views[source] or source >= reader:
            return False
        is_last = not any((reader, other.position) in self._path_of and other.source == path.use.target
                          for other in self.space.uses_by[reader])
        return (use.target, use.position) not in self._path_of or (use.target == reader and is_last)

    @cached_property
    def _read_at(self) -> Mapping[int, int]:
        """The program points at which parameters have been read, by the number of the last step."""
        return {number: place for place, events in self.reads.windows.events.items() for action, pair in events
                if action != "launch" for number in pair.steps}

    def _actions(self) -> tuple[Mapping[int, Sequence[Action | MixtureAction]],
                                Mapping[int, Sequence[Action | MixtureAction]]]:
        """`ahead` and `before`."""
        ahead, before, waits = (defaultdict[int, list[Action | MixtureAction]](list) for _ in range(3))
        taken = {one.window.reader: one for one in self.mixtures.values() if one.window.is_open}
        by_path, ends = {id(self._travelling[w.number]): w for w in self.windows}, dict[int, list[Window]]()
        for window in self.windows:
            ends.setdefault(self._travels[window.number].reader, []).append(window)
        sums = self._sums(by_path) if self.counts.hybrid.is_plain else {}
        for path in self._paths:
            target, known = path.use.target, by_path.get(id(path))
            if (mixture := taken.get(target)) is not None and path.use.source == mixture.index:
                before[target].append(MixtureAction("take", taken.pop(target)))
            for window in [w for w in ends.get(target, ()) if self._travels[w.number].target == path.use.source]:
                before[target] += self._ends(window)
                ends[target].remove(window)
            if known is None:
                for number, timed in enumerate(path.steps):
                    place, action = sums.get((target, path.use.position, number), (target, Action("run", timed)))
                    before[place] += () if action is None else (action,)
            else:
                launched = (Action("run", timed) for timed in path.steps[: path.sent]), (
                    Action("launch", path.steps[path.sent], known.number),)
                (ahead[self._travels[known.number].source + 1] if known.ahead else before[target]).extend(
                    action for some in launched for action in some)
        for target, windows in ends.items():
            waits[target] += (action for window in windows for action in self._ends(window))
        for target, mixture in taken.items():
            waits[target].append(MixtureAction("take", mixture))
        for index, mixture in self.mixtures.items():
            waits[index].append(MixtureAction("send", mixture))
            if (at := mixture.window).is_open:
                ahead[at.behind + 1].append(MixtureAction("run", mixture))
            else:
                waits[index] += MixtureAction("run", mixture), MixtureAction("take", mixture)
        return ahead, {index: [*before[index], *waits[index]] for index in sorted({*before, *waits})}

    def _sums(self, windows: Collection[int]) -> Mapping[StepKey, tuple[int, Action | None]]:
        """By step of a sum of single numbers that others are merged with, or that is computed later for them: the
        decision before which it runs, and its action (None: it is in another's message). ``windows``: paths with."""
        step_of = {(path.use.target, path.use.position, number): timed
                   for path in self._paths for number, timed in enumerate(path.steps)}
        alone = frozenset((path.use.target, path.use.position, path.sent)
                          for path in self._paths if id(path) in windows)
        made = NumberSums(self.reads, [path[:3] for path in self._paths], alone).groups()
        return {key: (place, Action("run", step_of[key], sums=[step_of[one] for one in keys[:-1]]) if keys else None)
                for key, (place, keys) in made.items()}

    def _ends(self, window: Window) -> list[Action]:
        path = self._travelling[window.number]
        return [Action("wait", path.steps[path.sent], window.number),
                *(Action("run", timed) for timed in path.steps[path.sent + 1 :])]

    @property
    def described(self) -> list[tuple[int, int, bool, tuple[int, ...]]]:
        """By window: where its steps are, its reader, `Window.ahead`, `Window.put_off`."""
        travels = [(self._travels[window.number], window) for window in self.windows]
        return [(travel.target, travel.reader, window.ahead, window.put_off) for travel, window in travels]

    def layers_of(self, number: int) -> Sequence[int]:
        """The layers whose weights' gradients are computed after the launch of a window in backward, in order."""
        return next(window.put_off for window in self.windows if window.number == number)[::-1]


def runs(sent: Mapping[int, Sequence[TimedStep]]) -> Mapping[int, Sequence[Action | MixtureAction]]:
    """Steps by decision, each of which runs at once."""
    return {index: [Action("run", timed) for timed in steps] for index, steps in sent.items()}


def _sends(timed: TimedStep) -> bool:
    return bool(timed.forward.message or timed.backward.message)


def _path(use: TensorUse, steps: Sequence[TimedStep], priced: Sequence[PricedStep]) -> _Path:
    sent = [n for n, timed in enumerate(steps) if _sends(timed)]
    return _Path(use, steps, priced, sent[-1] if sent else NOWHERE)


class Running:
    """Runs actions of one pass over a program, of one of ``count`` micro-batches, as tasks of ``step``. ``share``: the
    time of a step in this pass; ``label``: what it is called; ``compute``: what the compute of experts is."""

    def __init__(self, step: StepTasks, share: Callable[[TimedStep], Timed], label: str, compute: str, count: float
                 ) -> None:
        self.step, self.share, self.label = step, share, label
        self.mixtures = RunningMixtures(step, count, label, compute)
        self._pending: dict[int, int] = {}

    def forward(self, actions: Iterable[Action | MixtureAction]) -> None:
        for action in actions:
            if isinstance(action, MixtureAction):
                self.mixtures.forward(action)
            else:
                self._do(action, "launch")

    def backward(self, actions: Sequence[Action | MixtureAction], launched: Callable[[int], None],
                 mixed: Callable[[MixtureAction], None]) -> None:
        """``launched`` is called with the number of a window after its launch, ``mixed`` with parts of mixtures."""
        for action in reversed(actions):
            if isinstance(action, MixtureAction):
                mixed(action)
                continue
            self._do(action, "wait")
            if action.kind == "wait":
                launched(action.number)

    def _do(self, action: Action, launch: str) -> None:
        timed, label = self.share(action.timed), (self.label, action.timed.target, action.timed.target)
        if action.sums:
            return self._sum_numbers([*map(self.share, action.sums), timed], label, launch)
        if action.kind == "run" or (action.kind == launch and timed.message is None):
            self.step.run(timed, label)
        elif action.kind == launch and timed.seconds:
            self._pending[action.number] = self.step.issue([timed], label)
        elif action.kind != launch and action.number in self._pending:
            self.step.wait([self._pending.pop(action.number)])

    def _sum_numbers(self, sums: Sequence[Timed], label: Label, launch: str) -> None:
        """One message in forward, of the gradients one for each."""
        if launch == "launch":
            self.step.wait([self.step.issue(sums, label)])
        else:
            for timed in sums:
                self.step.run(timed, label)


__all__ = ["Action", "ActivationSteps", "Running", "runs"]
