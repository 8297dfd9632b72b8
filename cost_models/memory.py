"""Bytes of training: parameters, gradients, optimizer state, what is live when; and the time of an optimizer step.

A terabyte is 1000^4 bytes. Nothing is summed over time: what is live at the fullest moment counts (`peak_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cost_models.compute import memory_efficiency
from cost_models.devices import ITEM_BYTES, Device
from cost_models.errors import ClusterError


@dataclass(frozen=True)
class Recipe:
    """An optimizer as torch.optim keeps it: ``num_states`` tensors of the parameter's shape, and ``num_factored``
    pairs of one row and one column for matrices (Shazeer, Stern 2018)."""

    name: str
    num_states: int
    num_factored: int = 0


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("sgd", 0),
        Recipe("sgd-momentum", 1),
        Recipe("adam", 2),
        Recipe("adamw", 2),
        Recipe("adamw-amsgrad", 3),
        Recipe("adagrad", 1),
        Recipe("rmsprop", 1),
        Recipe("adafactor", 0, 1),
    )
}


@dataclass(frozen=True)
class Precision:
    """In which dtypes training keeps things; ``master`` is the optimizer's own copy of the parameters, if any."""

    parameter: str
    gradient: str
    state: str
    master: str | None = None

    @staticmethod
    def plain(dtype: str) -> Precision:
        """As torch.optim does by itself: everything in the parameter's dtype."""
        return Precision(dtype, dtype, dtype)


PRECISIONS = {
    "float32": Precision.plain("float32"),
    "bfloat16": Precision.plain("bfloat16"),
    "float16-master": Precision("float16", "float16", "float32", "float32"),    # ZeRO paper: 2 + 2 + 12 bytes with Adam
    "bfloat16-master": Precision("bfloat16", "bfloat16", "float32", "float32"),
    "bfloat16-moments": Precision("bfloat16", "bfloat16", "bfloat16", "float32"),    # Megatron's precision-aware Adam
    "megatron-bfloat16": Precision("bfloat16", "float32", "float32", "float32"),    # main gradients in fp32: 18 bytes
}


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ClusterError listing those known."""
    if name not in RECIPES:
        raise ClusterError(f"unknown optimizer {name!r}: known are {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def precision(name: str) -> Precision:
    """The precision of that name, or all in one dtype. Raises ClusterError listing those known."""
    if name in PRECISIONS:
        return PRECISIONS[name]
    return Precision.plain(name) if _item_bytes(name) else PRECISIONS["float32"]


def _item_bytes(dtype: str) -> float:
    if dtype not in ITEM_BYTES:
        raise ClusterError(f"unknown dtype {dtype!r}: known are {', '.join(ITEM_BYTES)}, and the precisions "
                           f"{', '.join(PRECISIONS)}")
    return ITEM_BYTES[dtype]


@dataclass(frozen=True)
class TrainingState:
    """Bytes on one rank between steps; numbers or arrays."""

    parameters: Any
    gradients: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        return self.parameters + self.gradients + self.optimizer


def training_state(
    num_elements: Any,
    dtype: str,
    optimizer: str,
    *,
    zero_stage: int = 0,
    num_shards: int = 1,
    row_and_column: Any = 0,
) -> TrainingState:
    """State of ``num_elements`` parameter elements of a dtype or precision (arrays allowed).

    ``num_elements`` is what tensor and pipeline parallelism leave to a rank; ZeRO divides that once more, over the
    ``num_shards`` ranks that hold the same elements: optimizer state from stage 1, gradients from 2, parameters at 3.
    ``row_and_column``: sum of a matrix's two sizes, for factored optimizers.

    >>> state = training_state(7_500_000_000, "float16-master", "adam", zero_stage=1, num_shards=64)    # ZeRO, fig. 1
    >>> f"{state.total / 1e9:.1f} GB"
    '31.4 GB'
    """
    kept, how = precision(dtype), recipe(optimizer)
    if zero_stage not in (0, 1, 2, 3) or num_shards < 1:
        raise ClusterError(f"zero_stage must be 0 to 3 and num_shards at least 1, not {zero_stage} and {num_shards}")
    part = np.ceil(np.asarray(num_elements, dtype=float) / num_shards)
    by_stage = [np.asarray(num_elements, dtype=float) if zero_stage < first else part for first in (3, 2, 1)]
    parameters, gradients, states = by_stage
    master = ITEM_BYTES[kept.master] if kept.master else 0
    factored = how.num_factored * np.minimum(np.asarray(row_and_column, dtype=float), states)
    return TrainingState(
        parameters=parameters * _item_bytes(kept.parameter),
        gradients=gradients * _item_bytes(kept.gradient),
        optimizer=states * (master + how.num_states * _item_bytes(kept.state)) + factored * _item_bytes(kept.state),
    )


def training_bytes(num_elements: Any, dtype: str, optimizer: str) -> Any:
    """Parameter + gradient + optimizer state of ``num_elements`` elements (arrays allowed)."""
    return training_state(num_elements, dtype, optimizer).total


def optimizer_step_s(num_elements: Any, dtype: str, optimizer: str, device: Device) -> Any:
    """Memory-bound: parameter (or master copy), gradient and states are read, parameter, master and states written.

    ``num_elements`` are those of a parameter whose state this rank holds. Fused: no launches (torch.optim's foreach and
    fused paths). Large parameters move at the bandwidth of large transfers, unless the device has a curve for class
    "optimizer".
    """
    moved = np.asarray(num_elements, dtype=float) * step_bytes(dtype, optimizer)
    share = device.memory_bandwidth_efficiency
    if "optimizer" in device.memory_efficiency:
        share = memory_efficiency("optimizer", moved, device)
    return moved / (device.memory_bandwidth_bytes_per_s * share)


def step_bytes(dtype: str, optimizer: str) -> float:
    """Bytes of an element that an optimizer step reads and writes.

    >>> step_bytes("megatron-bfloat16", "adamw")    # gradient, master and moments in float32, the parameter written
    30.0
    """
    kept, how = precision(dtype), recipe(optimizer)
    parameter, state = _item_bytes(kept.parameter), _item_bytes(kept.state)
    master = 2 * ITEM_BYTES[kept.master] if kept.master else parameter
    return float(_item_bytes(kept.gradient) + parameter + master + 2 * (how.num_states + how.num_factored) * state)


def converted_bytes(dtype: str) -> float:
    """Bytes of an element that are read and written in addition to `step_bytes` where conversions between its dtypes
    are passes of their own, as of copies: the gradient to the master's dtype before the step, the parameter from the
    master after it.

    >>> converted_bytes("float16-master"), converted_bytes("megatron-bfloat16"), converted_bytes("float32")
    (12.0, 4.0, 0.0)
    """
    kept = precision(dtype)
    if not kept.master:
        return 0.0
    master = ITEM_BYTES[kept.master]
    return float(2 * master * (kept.gradient != kept.master) + master * (kept.parameter != kept.master))


def peak_bytes(starts: Any, ends: Any, nbytes: Any) -> float:
    """Bytes at the fullest moment, of values live from ``starts`` until before ``ends``.

    >>> peak_bytes([0, 1, 2], [2, 3, 4], [10, 20, 5])    # the first is gone when the third comes
    30.0
    """
    starts, ends, sizes = np.asarray(starts), np.asarray(ends), np.asarray(nbytes, dtype=float)
    lives = ends > starts
    moments = np.concatenate([ends[lives], starts[lives]])
    changes = np.concatenate([-sizes[lives], sizes[lives]])
    if not len(moments):
        return 0.0
    _, slot = np.unique(moments, return_inverse=True)
    return float(max(0.0, np.bincount(slot, weights=changes).cumsum().max()))


def in_flight_micro_batches(
    schedule: str, stage: int, num_stages: int, num_micro_batches: int, virtual: int = 1
) -> int:
    """Micro-batches whose activations rank ``stage`` (from 0) of a pipeline of ``num_stages`` holds at its fullest.

    GPipe holds all; 1F1B (PipeDream-flush; Narayanan et al. 2021) num_stages - stage, and never more than there are.
    With ``virtual`` chunks of layers on each stage, interleaved, the count is of chunks, each a ``virtual``-th of the
    stage: 2 (num_stages - stage - 1) + (virtual - 1) num_stages + 1 (megatron/core/pipeline_parallel/schedules.py;
    Korthikanti et al. 2022, section 4.2.3). Zero bubble (ZB-H1; Qi et al. 2023) puts off gradients of weights, and so
    every rank holds as much as 1F1B's first.

    >>> in_flight_micro_batches("1f1b", 0, 8, 64), in_flight_micro_batches("interleaved-1f1b", 0, 8, 64, virtual=4)
    (8, 39)
    """
    if not 0 <= stage < num_stages or num_micro_batches < 1 or virtual < 1:
        raise ClusterError(f"stage {stage} of {num_stages} with {num_micro_batches} micro-batches and {virtual} "
                           "chunks: stages count from 0, the others from 1")
    if (held := _IN_FLIGHT.get(schedule.lower())) is None:
        raise ClusterError(f"unknown schedule {schedule!r}: known are {', '.join(_IN_FLIGHT)}")
    return held(stage, num_stages, num_micro_batches, virtual)


def _as_1f1b(stage: int, num_stages: int, num_micro_batches: int, virtual: int) -> int:
    if virtual == 1:
        return min(num_stages - stage, num_micro_batches)
    return min(2 * (num_stages - stage - 1) + (virtual - 1) * num_stages + 1, num_micro_batches * virtual)


#: Chunks in flight, of (stage, stages, micro-batches, chunks on a stage).
_IN_FLIGHT: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda stage, num_stages, num_micro_batches, virtual: num_micro_batches * virtual,
    "1f1b": _as_1f1b,
    "interleaved-1f1b": _as_1f1b,
    "zero-bubble": lambda stage, num_stages, num_micro_batches, virtual: min(num_stages, num_micro_batches) * virtual,
}
