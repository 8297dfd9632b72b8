"""Bytes of training state and the time of an optimizer step, by recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cost_models.cluster import Device
from cost_models.errors import ClusterError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Recipe:
    """An optimizer as torch.optim keeps it: how many state tensors of the parameter's own dtype."""

    name: str
    num_states: int


RECIPES = {
    "sgd": Recipe("sgd", 0),
    "sgd-momentum": Recipe("sgd-momentum", 1),
    "adam": Recipe("adam", 2),
    "adamw": Recipe("adamw", 2),
    "adagrad": Recipe("adagrad", 1),
    "rmsprop": Recipe("rmsprop", 1),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ClusterError listing those known."""
    if name not in RECIPES:
        raise ClusterError(f"unknown optimizer {name!r}: known are {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def training_bytes(num_elements: Any, dtype: str, optimizer: str) -> Any:
    """Parameter + gradient + optimizer state of ``num_elements`` elements of one dtype (arrays allowed)."""
    return num_elements * ITEM_BYTES[dtype] * (2 + recipe(optimizer).num_states)


def optimizer_step_s(num_elements: Any, dtype: str, optimizer: str, device: Device) -> Any:
    """Memory-bound: parameter, gradient and states are read, parameter and states written; fused, no launches."""
    moved = num_elements * ITEM_BYTES[dtype] * (3 + 2 * recipe(optimizer).num_states)
    return moved / (device.memory_bandwidth_bytes_per_s * device.memory_bandwidth_efficiency)
