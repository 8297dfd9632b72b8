"""The number of pieces of linear layers (`schedule.pieces`) with which a plan is predicted fastest; whether rows of
experts travel while other products run (`schedule.expert_windows`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from autoparallel.planning.options import Options
from autoparallel.pricing import SpacePricer
from autoparallel.pricing.activation_steps import ActivationSteps
from autoparallel.pricing.expert_rows import sends_rows
from autoparallel.pricing.hidden import hidden_s
from autoparallel.pricing.rank_reads import RankReads
from autoparallel.schedule.expert_windows import overlaps_experts
from autoparallel.schedule.pieces import TRIED
from autoparallel.strategies.space import Strategy

_LOG = logging.getLogger("autoparallel")
#: Pieces are taken where they make a step shorter by more than this share.
LEAST_GAIN = 0.01
_ROUNDING = 1e-9    # a share of the step


def in_faster_pieces(pricer: SpacePricer, strategies: Sequence[Strategy], objective: float, options: Options
                     ) -> SpacePricer:
    """The pricer of a plan with layers in as many pieces as make its step shortest; as it is where the options say how
    many, where layers do not run in pieces, and where these do not pay. ``objective``: seconds of the step without
    overlap."""
    hybrid = pricer.counts.hybrid
    if options.pieces is not None or options.baseline or hybrid.copies > 1 or hybrid.puts_off_weights:
        return pricer
    best = whole = pricer.overlapping(pieces=1)
    whole_s = hidden_s(whole, strategies)
    most_s = whole_s + LEAST_GAIN * (objective - whole_s)
    for pieces in TRIED:
        other = whole.overlapping(pieces=pieces)
        saved_s = hidden_s(other, strategies)
        if saved_s == whole_s:    # no layer of this plan runs in pieces
            break
        if saved_s > most_s:
            best, most_s = other, saved_s
    return best


def with_faster_experts(pricer: SpacePricer, strategies: Sequence[Strategy], objective: float, options: Options
                        ) -> SpacePricer:
    """The pricer of a plan in which experts' rows travel while other products run where this makes the step shorter;
    else they are awaited at once, which holds less memory. A baseline stays as it is. ``objective``: as of
    `in_faster_pieces`."""
    hybrid = pricer.counts.hybrid
    if options.baseline or not overlaps_experts(hybrid) or not any(map(sends_rows, pricer.space.strategy_sets)):
        return pricer
    other = pricer.overlapping(experts_overlap=False)
    if hidden_s(pricer, strategies) - hidden_s(other, strategies) > _ROUNDING * objective:
        return pricer
    steps = (ActivationSteps(RankReads(pricer, strategies, stage), True) for stage in range(hybrid.stages))
    return other if any(one.window.is_open for step in steps for one in step.mixtures.values()) else pricer


def tell_of_pieces(pricer: SpacePricer, strategies: Sequence[Strategy]) -> None:
    """Warn where the step configuration asks for pieces, and no layer of the plan runs in any."""
    hybrid = pricer.counts.hybrid
    if hybrid.pieces > 1 and not any(ActivationSteps(RankReads(pricer, strategies, stage), True).pieced
                                     for stage in range(hybrid.stages)):
        _LOG.warning("pieces=%d changes nothing: no linear layer of this plan has an operand that is gathered, or a "
                     "result that is summed over ranks, within its block, and rows that %d divides", hybrid.pieces,
                     hybrid.pieces)


__all__ = ["in_faster_pieces", "tell_of_pieces", "with_faster_experts"]
