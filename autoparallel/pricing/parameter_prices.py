"""Bytes of a parameter's training state, and seconds of its optimizer's update, by strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autoparallel.pricing.op_costs import kept_precision, worst
from autoparallel.strategies.space import StrategySet
from cost_models import compute, memory

if TYPE_CHECKING:
    from autoparallel.pricing.unit_costs import Prices


def elements_of(prices: Prices, s: StrategySet) -> np.ndarray:
    """Elements of a parameter on the fullest rank, by strategy."""
    return prices.space.spaces(s.output_metas[0]).local_elements[s.outputs[0]]


def training_bytes(prices: Prices, s: StrategySet) -> np.ndarray:
    """Bytes of parameter, gradient and optimizer state on the fullest rank, by strategy."""
    (meta,), some = s.output_metas, elements_of(prices, s)
    if not (meta.requires_grad and prices.training):
        return some * meta.dtype.itemsize
    return memory.training_bytes(some, kept_precision(meta, prices.cluster), prices.optimizer)


def parameter_update_s(prices: Prices, s: StrategySet) -> np.ndarray:
    """Seconds of the optimizer's update on the fullest rank, by strategy."""
    (meta,), some, profile = s.output_metas, elements_of(prices, s), prices.cluster.profile
    if not (meta.requires_grad and prices.training):
        return np.zeros(len(some))
    dtype, moved = kept_precision(meta, prices.cluster), profile.update_bytes if profile is not None else 0.0
    each = [memory.optimizer_step_s(some, dtype, prices.optimizer, device)
            + (compute.traffic_s(moved * some, device) if moved else 0.0)
            for device in (kind.working_device for kind in prices.kinds)]
    return worst(each, prices.least)


__all__ = ["elements_of", "parameter_update_s", "training_bytes"]
