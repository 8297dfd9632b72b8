"""Unit costs: seconds and bytes of strategies on one cluster (`cost_models` applied to strategy sets).

Costs are arrays over the strategies or layouts of one strategy set. Decisions with the same set share them, so the time
to price a model hardly grows with its depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoparallel import clock
from autoparallel.capture import TensorMeta
from autoparallel.layout import Layout, Step
from autoparallel.layout.redistribution import Axes, axes_together
from autoparallel.pricing.chains import InChain, chains_of, fuses, with_losses
from autoparallel.pricing.exchanges import Inside, exchange_s, without_hidden
from autoparallel.pricing.op_costs import OpCosts, costs_of, share_read
from autoparallel.pricing.recomputing import Recomputing
from autoparallel.pricing.redistribution_costs import RedistributionPrices
from autoparallel.pricing.stage_devices import devices_of
from autoparallel.strategies.space import StrategySet, StrategySpace, TensorUse
from cost_models import Cluster, Group


@dataclass(frozen=True)
class OpPrice:
    """Seconds of one execution of an op, forward and backward, by strategy; they include the exchanges ``inside``."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    inside: tuple[Inside, ...] = ()

    @property
    def total_s(self) -> np.ndarray:
        return self.forward_s + self.backward_s


class Prices:
    """Unit costs of one strategy graph on one cluster; those of its redistributions are in ``redistribution``.

    ``optimizer``: names the recipe for state bytes and update time. ``direct``: redistributions take the fewest steps
    instead of the cheapest, as baselines do. ``stages``: the cluster has this many such meshes, one per pipeline rank.
    ``spread``: divide the work of each op by this number, for a lower bound over all meshes of that many devices.
    ``same_limit``: devices of unequal memory are to take as much each.

    On an unequal cluster an op takes what it takes on the slowest of the ``kinds`` of devices, a collective what it
    takes by the slowest NICs: here of all that the mesh has; `of_ranks` has the prices of one stage.
    """

    def __init__(self, space: StrategySpace, cluster: Cluster, optimizer: str = "adamw", training: bool = True,
                 direct: bool = False, stages: int = 1, spread: int = 1, same_limit: bool = False) -> None:
        clock.did("decisions read", len(space))
        self.space, self.cluster, self.optimizer, self.training = space, cluster, optimizer, training
        self.direct, self.spread, self.same_limit = direct, spread, same_limit
        self.device = cluster.working_device
        self.mesh_shape = mesh_shape = (stages, *space.mesh_shape)
        self.kinds, self.least, self.differ = cluster.kinds(range(math.prod(mesh_shape))), False, True
        #: Whether some hosts send to others by slower NICs, so that stages may differ in that.
        self._uneven = stages > 1 and any(one.bandwidth < 1 or one.failed_nics for one in cluster.slow)
        self.costs = costs_of(space.spaces, self.kinds, training, spread)
        self.groups = self._groups_by(range(math.prod(mesh_shape)))
        machine = (repr((self.groups, self.device)), mesh_shape, direct, training)
        self.redistribution = RedistributionPrices(space, cluster, self.groups, training, direct, machine)
        #: By strategy set and chain, of which equal blocks share theirs.
        self._ops: dict[tuple[int, InChain | None], OpPrice] = {}
        self._apart: dict[tuple[object, ...], tuple[OpPrice, OpPrice]] = {}
        self._pieces: dict[tuple[object, ...], OpPrice] = {}
        #: By the kinds of devices and NICs of a stage, of which there are a few.
        self._of_kinds: dict[tuple[object, ...], Prices] = {}
        self._of_ranks: dict[tuple[int, ...], Prices] = {}
        #: Of a copy for lower bounds: the prices of which it is one.
        self._whole: Prices | None = None

    def of_ranks(self, ranks: Sequence[int]) -> Prices:
        """The prices on the devices of some ranks of the pipeline axis, and by the NICs of their hosts; copies that
        communication needs take as long as on the slowest devices of all."""
        if not self.stages_differ:
            return self
        if (known := self._of_ranks.get(tuple(ranks))) is None:
            self._of_ranks[tuple(ranks)] = known = self._on(devices_of(self, ranks))
        return known

    def _on(self, devices: Sequence[int]) -> Prices:
        """The prices on these devices; sets of devices of the same kinds and NICs share them."""
        kinds, groups = self.cluster.kinds(devices), self._groups_by(devices) if self._uneven else self.groups
        key = (*map(id, kinds), repr(groups) if self._uneven else "")
        if key not in self._of_kinds:
            _ = self.chains    # which all share
            self._of_kinds[key] = made = copy(self)
            made.kinds, made.costs = kinds, costs_of(self.space.spaces, kinds, self.training, self.spread)
            made._ops, made._apart, made._pieces = {}, {}, {}
            if repr(groups) != repr(self.groups):
                made.groups, made.redistribution = groups, self.redistribution.by(groups)
        return self._of_kinds[key]

    @property
    def stages_differ(self) -> bool:
        """Whether stages of a pipeline may have other devices, or other NICs, than others."""
        return self.differ and (len(self.kinds) > 1 or self._uneven)

    def _groups_by(self, devices: Sequence[int]) -> Mapping[Axes, Group]:
        """By mesh axes their groups, which leave hosts by the NICs of those of ``devices``."""
        return {axes: self.cluster.group_of(self.mesh_shape, [axis + 1 for axis in axes], devices=devices)
                for axes in axes_together(self.space.mesh_shape)}

    def alike(self) -> Prices:
        """A copy in which each stage takes as long as on the slowest devices of all."""
        made = copy(self)
        made.differ = False
        return made

    def of_device(self, cache: float = 1.0) -> Prices:
        """A copy for lower bounds: with the seconds of the device alone, as if the host launched everything ahead
        (``cache``: and had a cache so many times as large), and of the fastest of several kinds and NICs, where ranks
        of a pipeline divide the work (else all wait for the slowest)."""
        return self._least_of("device", cache)

    def of_host(self) -> Prices:
        """A copy for lower bounds: with the seconds in which the host launches ops, by the fastest of several kinds."""
        return self._least_of("host")

    def _least_of(self, part: str, cache: float = 1.0) -> Prices:
        divided = self.mesh_shape[0] > 1
        if self.cluster.profile is None and not (self.stages_differ and divided):
            return self
        made = copy(self)
        if self._uneven:
            made.groups = self._groups_by(())
            made.redistribution = self.redistribution.by(made.groups)
        made.costs = costs_of(self.space.spaces, self.kinds, self.training, self.spread, part, cache, least=divided)
        made.least, made.differ, made._ops, made._pieces, made._whole = divided, False, {}, {}, self
        return made

    @property
    def whole(self) -> Prices:
        """Of a copy for lower bounds the prices of which it is one: of host and device, by the slowest kind."""
        return self._whole or self

    @property
    def recomputing(self) -> Recomputing:
        """How the software recomputes."""
        profile = self.cluster.profile
        return Recomputing(profile.early_stop > 0, profile.core_only > 0) if profile else Recomputing()

    def path(self, use: TensorUse, source: Layout, target: Layout) -> Sequence[Step]:
        """The redistribution steps of a use from layout to layout; lowering emits exactly these."""
        return self.redistribution.table(use).path(source, target)

    def op(self, strategy_set: StrategySet, chain: InChain | None = None) -> OpPrice:
        """The unit costs of an op, memoised; ``chain``: its part in a chain of fused ops."""
        key = (id(strategy_set), chain)
        if key not in self._ops:
            self._ops[key] = self._price_op(strategy_set, chain)
        return self._ops[key]

    def op_of(self, index: int) -> OpPrice:
        """The unit costs of the op of a decision."""
        return self.op(self.space.strategy_sets[index], self.chains[index])

    def piece_of(self, index: int, pieces: int) -> OpPrice:
        """The unit costs of one of so many equal pieces of the product of a decision, memoised. All pieces together
        take no less than the whole, though a table of measured products may have a smaller one at a higher rate."""
        s = self.space.strategy_sets[index]
        key = (id(s), self.chains[index], pieces)
        if key not in self._pieces:
            piece = self._price_op(s, None, costs_of(self.space.spaces, self.kinds, self.training, self.spread,
                                                     pieces=pieces))
            whole = self.op_of(index)
            self._pieces[key] = OpPrice(np.maximum(piece.forward_s, whole.forward_s / pieces),
                                        np.maximum(piece.backward_s, whole.backward_s / pieces), piece.inside)
        return self._pieces[key]

    def host_and_device(self, index: int) -> tuple[OpPrice, OpPrice] | None:
        """The unit costs of the op of a decision for the host alone, and for the device alone, memoised; None where
        the cluster does not say what the host needs."""
        if self.cluster.profile is None:
            return None
        s, chain = self.space.strategy_sets[index], self.chains[index]
        key = (id(s), chain, "apart")
        if key not in self._apart:
            apart = [costs_of(self.space.spaces, self.kinds, self.training, self.spread, part)
                     for part in ("host", "device")]
            host, device = (self._price_op(s, chain, costs, inside=False) for costs in apart)
            self._apart[key] = host, device
        return self._apart[key]

    @cached_property
    def chains(self) -> Sequence[InChain | None]:
        """By decision: the op's part in a chain that the software fuses into one kernel."""
        if self.cluster.profile is None:
            return [None] * len(self.space)
        return with_losses(self.space, chains_of(self.space) if fuses(self.cluster) else [None] * len(self.space))

    def local_bytes(self, meta: TensorMeta, numbers: np.ndarray) -> np.ndarray:
        """Bytes of a tensor on the fullest rank, an array: of each layout in ``numbers`` (`strategies.space` numbers a
        tensor's layouts)."""
        return self.costs.local_bytes(meta, numbers)

    def _price_op(self, s: StrategySet, chain: InChain | None, costs: OpCosts | None = None,
                  inside: bool = True) -> OpPrice:
        costs = costs or self.costs
        rule, count = s.rule, len(s.strategies)
        zeros = np.zeros(count)
        if rule is None or rule.fixed:
            return OpPrice(zeros, zeros)
        clock.did("ops priced")
        forward, backward = (zeros, costs.view_s(s)) if rule.alias else costs.work_s(s, chain)
        exchanges = without_hidden(tuple(self._inside(s)) if inside else (), forward, backward, self.space.mesh_shape,
                                   self.device.saved_by_overlap)
        forward = sum((i.forward_s for i in exchanges), forward)
        if self.training and any(m.requires_grad for m in s.output_metas):
            backward = sum((i.backward_s for i in exchanges), backward)
        return OpPrice(forward, backward, exchanges)

    def _inside(self, s: StrategySet) -> Iterator[Inside]:
        """The exchanges of all variants of an op, by mesh axis."""
        stored = self.cluster.profile is not None and self.cluster.profile.stores_sections > 0
        for number, row in enumerate(s.axis_strategies):
            for exchange in row.inside if not (stored and row.variant == "sections") else ():
                elements = self.space.spaces(s.input_metas[exchange.input]).local_elements[s.inputs[exchange.input]]
                elements = elements * share_read(s, exchange.input)
                for (axis, *others), group in self.groups.items():
                    if others or (row.halved % (2 * group.size) and exchange.action == "neighbours"):
                        continue    # shards that are not halved do not move
                    each = np.ones(len(elements)) if exchange.fixed else elements
                    num_bytes = each * (group.size if exchange.whole else 1) * exchange.bytes_per_element
                    uses = s.array[:, axis] == number
                    if uses.any():
                        seconds = np.where(uses, exchange_s(exchange.action, num_bytes, group), 0.0)
                        yield Inside(row.variant, axis, exchange, num_bytes, seconds, exchange.forward * seconds,
                                     exchange.backward * seconds)
