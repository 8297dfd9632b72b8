"""Machines on which communication costs what other systems' tests say, and plans on them.

Their constants: an all_reduce of b bytes among n devices costs alpha + beta 2 (n - 1)/n b, all_gather and
reduce_scatter beta (n - 1)/n b, with an alpha and a beta for each mesh axis; compute costs nothing, and heavy ops may
not be repeated. Here: wires of beta seconds per 1e9 bytes (alphas of about 1 are left out, or counted in by the test),
other ops for nothing, and heavy ops at a price that makes repeating one more expensive than any communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Shard

from autoparallel import Cluster, Plan
from autoparallel.search import evaluate
from cost_models import Device, Link
from tests.support.captured import plan_again

BYTES_PER_S = 1e9
HEAVY_FLOPS_PER_S = 1e9
UNLIMITED = 2**31 - 1

#: For spaces that know all_reduce only.
NO_REDUCE_SCATTER = {"reduce_scatter": 1e3}


def machine(mesh_shape: Sequence[int], beta: Sequence[float] = (), slowdown: Mapping[str, float] | None = None
            ) -> Cluster:
    """Devices of a mesh of one or two axes, with a beta for each."""
    wires = [Link(f"axis {axis}", UNLIMITED if axis == 0 else mesh_shape[1], 0.0, BYTES_PER_S / one, slowdown or {})
             for axis, one in enumerate(beta or [1.0] * len(mesh_shape))]
    heavy = dict.fromkeys(("matmul", "conv", "attention"), ((1.0, HEAVY_FLOPS_PER_S / 1e18),))
    device = Device("toy", {"float32": 1e18}, 1e18, 1.0, 1e15, 0.0, heavy, overlap_slowdown=2.0)
    like = Cluster.load("local-cpu", num_devices=math.prod(mesh_shape))
    return replace(like, name="toy", device=device, links=tuple(reversed(wires)), algorithms=("ring",), call_s={})


def planned(model: nn.Module, inputs: Sequence[Any], mesh_shape: Sequence[int], beta: Sequence[float] = (),
            slowdown: Mapping[str, float] | None = None, **options: Any) -> Plan:
    return plan_again(model, machine(mesh_shape, beta, slowdown), example_inputs=inputs, mesh_shape=mesh_shape,
                      **options)


def communication(made: Plan) -> float:
    """In the cost units of the stated objectives."""
    return (made.prediction.forward_communication_s + made.prediction.backward_communication_s) * BYTES_PER_S


def counts(made: Plan, direction: str = "", axis: str = "") -> Counter[str]:
    """Collectives of a step by kind, but for those of one number (losses)."""
    found: Counter[str] = Counter()
    for use in made.prediction.collectives:
        if use.num_bytes > 4 * use.count and use.direction.startswith(direction) and use.axis.startswith(axis):
            found[use.kind] += use.count
    return found


def judged(by: Plan, stated: Plan) -> float:
    """What the search's own judge says that a stated plan costs, in the problem that ``by`` is the best plan of."""
    assert by.study is not None
    pricer, problem = by.study.pricer, by.study.problem
    return evaluate(problem, pricer.choice_of(stated.strategies_on(pricer.space))).objective


def assert_not_beaten(best: Plan, stated: Plan) -> None:
    """The search's plan is proven optimal, and its own judge finds the stated one no cheaper."""
    assert best.evidence.stop_reason == "optimal"
    assert judged(best, best) <= judged(best, stated) * (1 + 1e-6)
    assert best.evidence.lower_bound_s <= judged(best, stated)


def alternating(layers: int) -> dict[str, Any]:
    """Pins on two axes: rows of the batch by the first; by the second columns of the even matrices, rows of the odd."""
    return {f"model.layers.{i}": (Shard(0), Partial() if i % 2 else Shard(1)) for i in range(layers)}
