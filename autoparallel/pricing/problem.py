"""Strategy space x prices x turns -> the search problem. A redistributed copy uses memory on its edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from autoparallel.capture import TensorMeta
from autoparallel.layout import RedistributionTable
from autoparallel.pricing.counts import Buffer, Turns
from autoparallel.pricing.unit_costs import PricedStep, Prices, dtype_name
from autoparallel.search.model.interned import firsts, paired
from autoparallel.search.model.problem import Edge, Node, Problem, Repeats, unchecked
from autoparallel.strategies.space import Label, Link, StrategySet, StrategySpace
from cost_models import collectives, compute

Allowed = Mapping[int, np.ndarray]
Made = TypeVar("Made")
#: Seconds that one fault counts for: more than any step takes.
FAULT_S = 1e3
SIDE_SHARE = 1e-3


class OpSeconds(NamedTuple):
    """Of an op in a step: forward (with what goes to the host), once more for backward, and backward (with what comes
    back)."""

    forward: float
    again: float
    backward: float


class Move(NamedTuple):
    """The steps that a link takes, and a number: the same for links of a kind between the same strategies."""

    link: Link
    path: Sequence[PricedStep]
    kind: int


class Faults(Protocol):
    """Choices that should not be taken (see `autoparallel.planning.baselines`): a count by strategy."""

    def site_faults(self, index: int) -> np.ndarray: ...

    def link_faults(self, link: Link, table: RedistributionTable) -> np.ndarray: ...


class SpacePricer:
    """Builds problems for one strategy space: all strategies, or only some labels of each site.

    ``allowed`` (choice numbers by site; sites left out are free) holds what pins leave; it binds every problem.
    ``faults`` are priced above everything else. ``exposed``: what share of the seconds counts in which parameters are
    gathered, and of those in which their gradients are reduced (`beside.least_exposed`).

    Side computations (positions, causal masks, rotary tables: nothing of the input, no gradient, hardly any bytes) are
    done on every rank; who needs a piece of one takes it, which is local.
    """

    def __init__(self, prices: Prices, limit_bytes: float = float("inf"), allowed: Allowed | None = None,
                 faults: Faults | None = None, turns: Turns | None = None, exposed: tuple[float, float] = (1.0, 1.0)
                 ) -> None:
        self.faults, self.exposed = faults, exposed
        self.turns = turns or Turns(prices.space, training=prices.training)
        self.prices, self.space, self.limit_bytes = prices, prices.space, limit_bytes
        self.allowed = {**_side_computations(self.space), **(allowed or {})}
        self.axis_names = self.space.axis_names
        self._made: dict[object, Any] = {}

    @property
    def num_nodes(self) -> int:
        return len(self.space)

    def choices(self, site: int) -> np.ndarray:
        """Choice numbers (into the site's strategies) that pins leave."""
        return self._choices[site]

    @cached_property
    def _choices(self) -> list[np.ndarray]:
        whole = {size: np.arange(size) for size in {len(s.labels) for s in self.space.strategies}}
        found = [whole[len(s.labels)] for s in self.space.strategies]
        for site, left in self.allowed.items():
            found[site] = left
        return found

    def rows(self, node: int, axis: int) -> Sequence[int]:
        s = self.space.strategies[node]
        alike = node if node in self.allowed else -1
        return self.once(("rows", id(s), alike, axis), lambda: np.unique(s.array[self.choices(node), axis]).tolist())

    def labels(self, node: int) -> Sequence[Label]:
        s = self.space.strategies[node]
        return [s.labels[c] for c in self.choices(node)]

    def repeat_row(self, node: int, axis: int) -> int:
        return self.rows(node, axis)[0]

    def full(self) -> Problem:
        """The problem with every strategy that pins leave."""
        return self._problem(self._choices)

    def exposing(self, share: tuple[float, float]) -> SpacePricer:
        """The same with another ``exposed``."""
        other = copy(self)
        other.exposed = share
        return other

    def full_like(self, problem: Problem) -> Problem:
        """The same, made of that of a pricer which differs by ``exposed`` only: links of parameters cost otherwise."""
        edges = self._edges(self._choices, self._picks(self._choices))
        return problem.with_edges(edges.followed_by(problem.edges[len(edges):]))

    def problem(self, allowed: Sequence[Sequence[Label]]) -> Problem:
        """The problem with exactly these labels; labels that a site does not have are left out."""
        chosen = []
        for site, labels in enumerate(allowed):
            position, free = self.space.strategies[site].position, set(self.choices(site).tolist())
            numbers = [position[tuple(x)] for x in labels if tuple(x) in position]
            chosen.append(np.array([n for n in numbers if n in free], dtype=np.int64))
        return self._problem(chosen)

    def choice_of(self, labels: Sequence[Label]) -> tuple[int, ...]:
        """Choice numbers in `full()` of one label per site."""
        found = self.numbers(labels).tolist()
        for site, left in self.allowed.items():
            found[site] = int(np.searchsorted(left, found[site]))
        return tuple(found)

    def choice_near(self, labels: Sequence[Label]) -> tuple[int, ...]:
        """The same for labels that pins may forbid: of such a site the first choice."""
        found = []
        for site, label in enumerate(labels):
            places = np.flatnonzero(self.choices(site) == self.space.strategies[site].position[label])
            found.append(int(places[0]) if len(places) else 0)
        return tuple(found)

    def labels_of(self, choice: Sequence[int]) -> list[Label]:
        """The inverse of `choice_of`."""
        numbers = list(choice)
        for site, left in self.allowed.items():
            numbers[site] = left[numbers[site]]
        return [s.labels[number] for s, number in zip(self.space.strategies, numbers, strict=True)]

    def _problem(self, chosen: Sequence[np.ndarray]) -> Problem:
        picks = self._picks(chosen)
        edges = self._edges(chosen, picks)
        single = [self._buffer(buffer, chosen) for buffer in self.turns.buffers]
        if self.turns.hybrid.gathers_ahead:
            single += [edge for link in self.space.links if self.turns.gathers_ahead(link)
                       for edge in self._pieces(link, chosen)]
        return Problem(self._nodes(chosen, picks), edges.followed_by(single), self.limit_bytes, "strategy space")

    def _picks(self, chosen: Sequence[np.ndarray]) -> np.ndarray:
        """Numbers of these choices; equal choices, equal number."""
        known: dict[bytes, int] = self.once("picks", dict)
        numbers = {id(c): known.setdefault(c.tobytes(), len(known)) for c in {id(c): c for c in chosen}.values()}
        return np.array([numbers[id(c)] for c in chosen], np.int64)

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What is made for a key, the first time; what is alike has one."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def _nodes(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Node]:
        """One per site; those of a kind with the same choices are made once."""
        intervals, copies = self.turns.site_lives
        first, which = firsts(paired(paired(self.site_kinds, picks), np.unique(copies, return_inverse=True)[1]))
        models = [self.once(("node", int(self.site_kinds[at]), int(picks[at]), float(copies[at])),
                            partial(self._node, at, chosen[at], int(picks[at]), float(copies[at]))) for at in first]
        made = Repeats(models, which, name=[site.name for site in self.space.sites], interval=intervals)
        if self.faults is None:
            return made
        faults = [FAULT_S * self.faults.site_faults(index)[numbers] for index, numbers in enumerate(chosen)]
        return Repeats([unchecked(node, costs=node.costs + more) for node, more in zip(made, faults, strict=True)])

    def _node(self, index: int, numbers: np.ndarray, pick: int, copies: float) -> Node:
        """Kinds that differ otherwise may share costs, or usages."""
        site, s = self.space.sites[index], self.space.strategies[index]
        times, shared = self.turns.op_times(index), self.turns.ranks_with(index)
        key = (id(s), pick, site.kind, int(self.readers[index]) if site.kind == "hub" else 0)
        costs = self.once(("cost", *key, times, self.turns.offloads(index), shared),
                          lambda: self._site_s(index, times)[numbers])
        usages = self.once(("usage", *key, copies), lambda: self.site_bytes(index)[numbers] * copies)
        labels = s.labels if len(numbers) == len(s.labels) else tuple(s.labels[n] for n in numbers)
        return Node(site.name, costs, usages, labels=labels)

    def _site_s(self, index: int, times: tuple[int, int]) -> np.ndarray:
        s, kind = self.space.strategies[index], self.space.sites[index].kind
        if kind == "op":
            price, moved = self.prices.op(s), self.offload_s(index)
            return times[0] * price.forward_s + times[1] * price.backward_s + moved[0] + moved[1]
        if kind == "hub":
            return times[1] * self.hub_s(index)
        if kind == "parameter":
            return self.turns.counts[index] * (self.parameter_s(index) + self.shared_s(index))
        return np.zeros(len(s.labels))

    def op_s(self, index: int, number: int, stage: int) -> OpSeconds:
        """What a strategy of an op takes in a step, on a rank of the stage."""
        s, times, moves = self.space.strategies[index], self.turns.op_times(index, stage), self.turns.offloads(index)

        def first() -> OpSeconds:
            price, (there, back) = self.prices.op(s), self.offload_s(index)
            once, again, backward = float(price.forward_s[number]), times[0] - times[1], float(price.backward_s[number])
            return OpSeconds(times[1] * once + float(there[number]), again * once,
                             times[1] * backward + float(back[number]))

        return self.once(("op", id(s), number, times, moves), first)

    def parameter_s(self, index: int) -> np.ndarray:
        """Seconds of the optimizer's step for a parameter, by strategy."""
        s = self.space.strategies[index]
        return self.once(("updated", id(s)), lambda: self.prices.parameter_s(s))

    def shared_bytes(self, index: int) -> np.ndarray:
        """Of a parameter's gradient, in the type in which ranks of the pipeline add it up; by strategy."""
        s, dtype = self.space.strategies[index], self.turns.hybrid.sum_dtype
        meta = s.output_metas[0]
        return (dtype or meta.dtype).itemsize / meta.dtype.itemsize * self.prices.local_bytes(meta, s.outputs[0])

    def shared_s(self, index: int) -> np.ndarray:
        """Seconds of adding up the gradients that several ranks of the pipeline have of a parameter, by strategy."""
        ranks = self.turns.ranks_with(index)
        if len(ranks) < 2:
            return self._nothing(len(self.space.strategies[index].labels))[0]
        shape = (self.turns.hybrid.pipeline_ranks, *self.space.mesh_shape)
        return self.prices.bucket_s(self.prices.cluster.group(shape, 0, ranks), self.shared_bytes(index))

    def hub_s(self, index: int) -> np.ndarray:
        """Seconds of adding up the gradients from a value's readers once, by strategy."""
        s, readers = self.space.strategies[index], int(self.readers[index])
        return self.once(("hub", id(s), readers), lambda: self.prices.sum_s(s, readers))

    def offload_s(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds in a step of moving what an op makes to the host, and back for backward, by strategy."""
        if not (times := self.turns.offloads(index)):
            return self._nothing(len(self.space.strategies[index].labels))
        return self._moved_s(times, self.site_bytes(index))

    def _nothing(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self.once(("nothing", size), lambda: (np.zeros(size),) * 2)

    def offload_copy_s(self, link: Link) -> tuple[np.ndarray, np.ndarray]:
        """The same of a redistributed copy, by (strategy of the link's source, of its target)."""
        times = self.turns.offloads_copy(link)
        return self._moved_s(times, self.prices.link_copies(link))

    def _moved_s(self, times: int, num_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cluster = self.prices.cluster
        seconds = [times * collectives.host_copy_s(num_bytes, cluster, to_device) for to_device in (False, True)]
        return np.where(num_bytes > 0, seconds[0], 0.0), np.where(num_bytes > 0, seconds[1], 0.0)

    def site_bytes(self, index: int) -> np.ndarray:
        """Bytes that a site holds, once, by strategy."""
        s, kind = self.space.strategies[index], self.space.sites[index].kind
        return self.once(("bytes", id(s), kind), lambda: self._bytes_of(s, kind))

    def _bytes_of(self, s: StrategySet, kind: str) -> np.ndarray:
        if kind == "parameter":
            return self.prices.parameter_bytes(s) + self._sums_bytes(s.output_metas[0], s.outputs[0])
        total = self.prices.exchanged_bytes(s)
        if kind in ("hub", "output", "update") or (s.rule is not None and s.rule.alias):
            return total
        for meta, numbers in zip(s.output_metas, s.outputs, strict=True):
            total = total + self.prices.local_bytes(meta, numbers)
        if s.rule is not None and self.prices.training:
            for i, size in s.rule.extra_bytes.items():
                meta = s.input_metas[i]
                total = total + size / meta.dtype.itemsize * self.prices.local_bytes(meta, s.inputs[i])
            if s.rule.work_bytes:
                total = total + s.rule.work_bytes * self.prices.share_of_work(s)
        return total

    def _sums_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes of sums of gradients beside the gradients, for layout numbers of a parameter."""
        return self.turns.accumulator_bytes(meta) / meta.dtype.itemsize * self.prices.local_bytes(meta, numbers)

    def _copy_bytes(self, link: Link) -> np.ndarray:
        """Bytes of the redistributed copy that a link makes, and of its gradients' sums where those are apart: instead
        of the sums of the piece it was made of. By (strategy of the link's source, of its target)."""
        copies = self.prices.link_copies(link)
        if not self.turns.of_parameter[link.source] or self.turns.hybrid.zero_stage >= 2:
            return copies
        source, target = self.space.strategies[link.source], self.space.strategies[link.target]
        whole = self._sums_bytes(link.meta, target.inputs[link.position])
        piece = self._sums_bytes(link.meta, source.outputs[link.output])
        return np.where(copies > 0, copies + np.maximum(whole[None, :] - piece[:, None], 0.0), 0.0)

    def _edges(self, chosen: Sequence[np.ndarray], picks: np.ndarray) -> Repeats[Edge]:
        """One per link; those of a kind between the same choices are made once."""
        (sources, targets), (intervals, copies), links = self.link_ends, self.turns.copy_lives, self.space.links
        kinds = paired(paired(self.link_kinds, picks[sources]), picks[targets])
        first, which = firsts(paired(kinds, np.unique(copies, return_inverse=True)[1]))

        def model(at: int) -> Edge:
            rows, columns = chosen[sources[at]], chosen[targets[at]]
            key = int(self.link_kinds[at]), int(picks[sources[at]]), int(picks[targets[at]]), float(copies[at])
            exposed = self.exposed if self.parameter_links[at] else None
            return self.once(("edge", *key, exposed), lambda: self._edge(links[at], rows, columns, float(copies[at])))

        made = Repeats([model(at) for at in first], which, source=sources.tolist(), target=targets.tolist(),
                       interval=intervals)
        if self.faults is None:
            return made
        faults = [FAULT_S * self.faults.link_faults(link, self.prices.table(link.meta))[
            np.ix_(chosen[link.source], chosen[link.target])] for link in links]
        return Repeats([unchecked(edge, costs=edge.costs + more) for edge, more in zip(made, faults, strict=True)])

    def _edge(self, link: Link, rows: np.ndarray, columns: np.ndarray, copies: float) -> Edge:
        """Kinds that differ otherwise may share costs, or usages."""
        key, of_parameter = self._link_key(link, rows, columns), self.turns.of_parameter[link.source]
        costs = self._link_costs(link, rows, columns)

        def held() -> np.ndarray | None:
            usages = self._copy_bytes(link)[np.ix_(rows, columns)] * copies
            return usages if usages.any() else None

        return Edge(link.source, link.target, costs, self.once(("copies", key, copies, of_parameter), held))

    def _link_key(self, link: Link, rows: np.ndarray, columns: np.ndarray) -> tuple[object, ...]:
        """The same for links that are alike between these choices of their ends."""
        source, target = self.space.strategies[link.source], self.space.strategies[link.target]
        return id(source), rows.tobytes(), link.output, id(target), columns.tobytes(), link.position

    def _link_costs(self, link: Link, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Seconds of a link between these choices of its ends."""
        times, (there, back) = self.turns.link_times(link), self.exposed
        counted = (there * times[0], back * times[1]) if self.turns.of_parameter[link.source] else times
        sums, summing, moves = self.turns.sums(link), self.turns.summing(link), self.turns.offloads_copy(link)
        return self.once(("link", self._link_key(link, rows, columns), counted, sums, summing, moves), lambda: (
            self.prices.link_s(link, counted, summing) + (self.sums_s(link) if sums else 0.0)
            + (sum(self.offload_copy_s(link)) if moves else 0.0))[np.ix_(rows, columns)])

    def moves(self, labels: Sequence[Label]) -> Sequence[Move]:
        """What links do between the labels of their ends, in the order of their targets; of those that do nothing only
        those of parameters."""
        def found() -> list[Move]:
            numbers, kinds = self.numbers(labels), self.link_kinds
            sources, targets = self.link_ends
            codes = (kinds * self.most_choices + numbers[sources]) * self.most_choices + numbers[targets]
            paths, which = self.each("steps", codes, lambda at: self._steps(
                self.space.links[at], labels[sources[at]], labels[targets[at]]))
            some = np.array([bool(path) for path in paths], bool)[which] | self.parameter_links
            return [Move(self.space.links[at], paths[kind], kind)
                    for at, kind in zip(np.flatnonzero(some).tolist(), which[some].tolist(), strict=True)]

        return self.once(("moves", tuple(labels)), found)

    def each(self, name: object, codes: np.ndarray, make: Callable[[int], Made]) -> tuple[list[Made], np.ndarray]:
        """What is made for each distinct code, once for all plans, from where it is first; and which each is of."""
        values, first, which = np.unique(codes, return_index=True, return_inverse=True)
        made = [self.once((name, code), partial(make, at))
                for code, at in zip(values.tolist(), first.tolist(), strict=True)]
        return made, which.reshape(-1)

    def numbers(self, labels: Sequence[Label]) -> np.ndarray:
        """Their numbers among the strategies of each site."""
        return self.once(("numbers", tuple(labels)), lambda: np.array(
            [s.position[label] for s, label in zip(self.space.strategies, labels, strict=True)], np.int64))

    def site_codes(self, labels: Sequence[Label]) -> np.ndarray:
        """By site a number, the same for sites of a kind (`site_kinds`) that have the same strategy."""
        return self.site_kinds * self.most_choices + self.numbers(labels)

    @cached_property
    def most_choices(self) -> int:
        return max((len(s.labels) for s in self.space.strategies), default=0)

    @cached_property
    def link_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The sources and the targets of all links."""
        return self._links[:, 0], self._links[:, 2]

    @cached_property
    def _links(self) -> np.ndarray:
        """A row (source, output, target, position) per link."""
        columns = list(zip(*self.space.links, strict=True))[:4] or [()] * 4
        return np.stack([np.array(column, np.int64) for column in columns], axis=1)

    @cached_property
    def parameter_links(self) -> np.ndarray:
        """Whether each link reads a parameter."""
        return np.array(self.turns.of_parameter, bool)[self.link_ends[0]]

    @cached_property
    def site_kinds(self) -> np.ndarray:
        """By site a number, the same for those that work alike: all of their prices are the same."""
        turns, count = self.turns, len(self.space)
        facts: list[Sequence[Any] | np.ndarray] = [_numbered(map(id, self.space.strategies)), self.readers,
                                                   turns.of_parameter]
        facts += [fact for fact in (turns.counts, turns.held) if len(set(fact)) > 1]  # of a sketch
        if not turns.in_one:
            facts.append(_numbered(turns.stages_of))
        if turns.hybrid.recompute != "none":
            facts += [[index in turns.runs_again for index in range(count)], list(map(turns.offloads, range(count)))]
        return _alike(facts)

    @cached_property
    def link_kinds(self) -> np.ndarray:
        """The same of links."""
        turns, links, (sources, outputs, targets, positions) = self.turns, self.space.links, self._links.T
        facts: list[Sequence[Any] | np.ndarray] = [self.site_kinds[sources], outputs, self.site_kinds[targets],
                                                   positions]
        if turns.hybrid.recompute != "none" or turns.hybrid.zero_stage == 3:
            facts += [list(map(turns.reads_again, links)), list(map(turns.offloads_copy, links))]
        return _alike(facts)

    @cached_property
    def readers(self) -> np.ndarray:
        """How many ops and hubs read what each site makes."""
        sources, targets = self.link_ends
        counted = np.array([site.kind in ("op", "hub") for site in self.space.sites], bool)
        return np.bincount(sources[counted[targets]], minlength=len(self.space))

    def _steps(self, link: Link, of_source: Label, of_target: Label) -> Sequence[PricedStep]:
        source = self.space.strategies[link.source].output_layout(of_source, link.output)
        target = self.space.strategies[link.target].input_layout(of_target, link.position)
        return self.prices.steps(link.meta, source, target, self.turns.summing(link)) if source != target else ()

    def _buffer(self, buffer: Buffer, chosen: Sequence[np.ndarray]) -> Edge:
        """An edge that costs nothing and takes the bytes of a buffer, by the layout of what is sent."""
        link = buffer.link
        s, shape = self.space.strategies[link.source], (len(chosen[link.source]), len(chosen[link.target]))
        num_bytes = self.prices.local_bytes(link.meta, s.outputs[link.output])[chosen[link.source]]
        usages = np.broadcast_to(buffer.copies * num_bytes[:, None], shape)
        return Edge(link.source, link.target, np.zeros(shape), usages, self.turns.buffer_life(buffer.stage))

    def _pieces(self, link: Link, chosen: Sequence[np.ndarray]) -> Iterator[Edge]:
        """An edge that costs nothing and takes the bytes of what is gathered on the way to what the link reads."""
        rows, columns = chosen[link.source], chosen[link.target]
        usages = self.once(("pieces", self._link_key(link, rows, columns)),
                           lambda: self.prices.link_pieces(link)[np.ix_(rows, columns)])
        if usages.any():
            yield Edge(link.source, link.target, np.zeros(usages.shape), usages, self.turns.pieces_life(link))

    def sums_s(self, link: Link) -> np.ndarray:
        """Seconds in which a parameter's gradients of several turns are added up (two reads and a write of each, or one
        read and both of a more precise sum), by (strategy of the link's source, of its target)."""
        source, target = self.space.strategies[link.source], self.space.strategies[link.target]
        rows, columns = source.outputs[link.output], target.inputs[link.position]
        if self.turns.hybrid.zero_stage >= 2:  # of the pieces that are stored
            held = np.broadcast_to(self.prices.local_bytes(link.meta, rows)[:, None], (len(rows), len(columns)))
        else:  # of what the ops read
            held = np.broadcast_to(self.prices.local_bytes(link.meta, columns)[None], (len(rows), len(columns)))
        device, apart = self.prices.cluster.device, self.turns.accumulator_bytes(link.meta) / link.meta.dtype.itemsize
        moved = (1 + 2 * apart if apart else 3) * held
        return self.turns.sums(link) * compute.op_time_s("elementwise", 0.0, moved, dtype_name(link.meta), device)


def _alike(facts: Sequence[Sequence[Any] | np.ndarray]) -> np.ndarray:
    """Numbers: equal for those of which all facts are."""
    first, *rest = (np.unique(np.asarray(fact), return_inverse=True)[1].reshape(-1) for fact in facts)
    return reduce(paired, rest, first)


def _numbered(values: Iterable[object]) -> list[int]:
    """Equal values, equal number: in the order in which they come, so that it does not depend on where they lie."""
    numbers = dict[object, int]()
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _side_computations(space: StrategySpace) -> dict[int, np.ndarray]:
    """Ops that read no input and need no gradient, with at most `SIDE_SHARE` of what all ops make on a rank: only
    repeated."""
    from_input = {site.index for site in space.sites if site.kind == "input"}
    for link in space.links:  # in the order of their targets
        if link.source in from_input:
            from_input.add(link.target)
    ops = [site.index for site in space.sites if site.kind == "op" and site.index not in from_input]
    work = {id(s): s for s in space.strategies if s.rule is not None}
    sizes = {key: sum(m.num_bytes for m in s.output_metas) for key, s in work.items()}
    most = SIDE_SHARE * sum(sizes[id(s)] for s in space.strategies if id(s) in sizes) / math.prod(space.mesh_shape)
    whole = {key: np.flatnonzero((s.array == 0).all(axis=1)) for key, s in work.items()
             if sizes[key] <= most and _is_aside(s)}
    return {index: whole[key] for index in ops if (key := id(space.strategies[index])) in whole}


def _is_aside(s: StrategySet) -> bool:
    """Whether ops of these strategies have nothing to do with gradients, and are not made in pieces for nothing."""
    filled = s.rule is not None and not s.input_metas and not s.rule.fixed
    return not filled and not any(m.requires_grad for m in (*s.input_metas, *s.output_metas))
