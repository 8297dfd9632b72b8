"""What a plan costs, part by part: the same prices that the search added up, told apart for the report."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.layout import COLLECTIVES
from autoparallel.plans import CollectiveUse, Prediction
from autoparallel.pricing.problem import SpacePricer
from autoparallel.rules.space import Label
from autoparallel.search.problem import Problem


def predict(pricer: SpacePricer, problem: Problem, labels: Sequence[Label], peak_bytes: float) -> Prediction:
    """Seconds and bytes of the plan that takes ``labels``; the parts add up to the search's objective."""
    space, prices = pricer.space, pricer.prices
    forward = backward = optimizer = state = activations = 0.0
    repeated = []
    for site, strategies, label in zip(space.sites, space.strategies, labels, strict=True):
        number = strategies.position[label]
        if site.kind == "op":
            price = prices.op(strategies)
            forward += float(price.forward_s[number])
            backward += float(price.backward_s[number])
            if not strategies.known and any(m.requires_grad for m in strategies.output_metas):
                repeated.append(str(space.graph.nodes[site.node]))
        elif site.kind == "parameter":
            optimizer += float(prices.parameter_s(strategies)[number])
            state += float(prices.parameter_bytes(strategies)[number])
    activations = _kept_bytes(pricer, problem, labels) - state
    uses = _collectives(pricer, labels)
    local = [u for u in uses if u.kind not in COLLECTIVES]
    return Prediction(
        forward_s=forward + sum(u.seconds for u in local if u.direction == "forward"),
        backward_s=backward + sum(u.seconds for u in local if u.direction == "backward"),
        optimizer_s=optimizer,
        forward_communication_s=sum(u.seconds for u in uses if u.direction == "forward" and u.kind in COLLECTIVES),
        backward_communication_s=sum(u.seconds for u in uses if u.direction == "backward" and u.kind in COLLECTIVES),
        state_bytes=state,
        activation_bytes=max(0.0, activations),
        peak_bytes=peak_bytes,
        collectives=tuple(u for u in uses if u.kind in COLLECTIVES),
        repeated_ops=tuple(repeated),
    )


def _kept_bytes(pricer: SpacePricer, problem: Problem, labels: Sequence[Label]) -> float:
    """Bytes live at the end of the forward pass."""
    choice = pricer.choice_of(labels)
    turn = len(pricer.space)
    total = sum(float(n.usages[c]) for n, c in zip(problem.nodes, choice, strict=True)
                if n.interval[0] <= turn < n.interval[1])
    return total + sum(
        float(e.usages[choice[e.source], choice[e.target]])
        for e in problem.edges
        if e.usages is not None and e.interval[0] <= turn < e.interval[1]
    )


def _collectives(pricer: SpacePricer, labels: Sequence[Label]) -> list[CollectiveUse]:
    space, prices = pricer.space, pricer.prices
    found: dict[tuple[str, str, str], list[float]] = {}
    for link in space.links:
        source = space.strategies[link.source].output_layout(labels[link.source], link.output)
        target = space.strategies[link.target].input_layout(labels[link.target], link.position)
        if source == target:
            continue
        layouts = space.spaces(link.meta)
        for step in prices.path(link.meta, source, target):
            seconds = prices.step_s(link.meta, step)
            elements = max(layouts.local_elements[layouts.index(x)] for x in (step.before, step.after))
            axis = space.axis_names[step.axis]
            for direction, kind, s in zip(("forward", "backward"), (step.forward, step.backward), seconds, strict=True):
                if kind != "none" and (direction == "forward" or (link.meta.requires_grad and prices.training)):
                    entry = found.setdefault((kind, axis, direction), [0, 0.0, 0.0])
                    entry[0] += 1
                    entry[1] += float(elements) * link.meta.dtype.itemsize
                    entry[2] += s
    return [CollectiveUse(k, a, d, int(n), b, s) for (k, a, d), (n, b, s) in sorted(found.items())]

