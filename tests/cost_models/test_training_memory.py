"""Bytes of training state, liveness, and defects found in public systems."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, memory
from cost_models.memory import PRECISIONS, RECIPES, in_flight_micro_batches, peak_bytes, training_state


@pytest.mark.parametrize(("dtype", "optimizer", "bytes_per_element"), [
    ("float32", "sgd", 8),
    ("float32", "sgd-momentum", 12),
    ("float32", "adamw", 16),
    ("float32", "adamw-amsgrad", 20),
    ("bfloat16", "sgd", 4),
    ("bfloat16", "adamw", 8),
    ("bfloat16-master", "adamw", 16),     # 2 + 2 + (4 + 4 + 4)
    ("megatron-bfloat16", "adamw", 18),   # 2 + 4 + (4 + 4 + 4)
    ("bfloat16-master", "sgd-momentum", 12),
])
def test_bytes_per_element(dtype: str, optimizer: str, bytes_per_element: int) -> None:
    assert memory.training_bytes(10, dtype, optimizer) == 10 * bytes_per_element
    assert memory.training_bytes(np.array([0, 10]), dtype, optimizer).tolist() == [0, 10 * bytes_per_element]


def test_the_zero_papers_figure() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks: 120, 31.4, 16.6, 1.9 GB."""
    totals = [training_state(7.5e9, "float16-master", "adam", zero_stage=stage, num_shards=64).total / 1e9
              for stage in (0, 1, 2, 3)]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_defect_zero_and_tensor_parallelism_divided_twice() -> None:
    """1,000 elements on 2 tensor-parallel ranks leave 500; ZeRO over 4 divides those once: 125, and not 125/2."""
    local = 1000 / 2
    state = training_state(local, "float32", "adamw", zero_stage=3, num_shards=4)
    assert state.parameters == 125 * 4
    assert state.gradients == 125 * 4
    assert state.optimizer == 125 * 8


@settings(max_examples=60)
@given(st.integers(1, 10**10), st.sampled_from(sorted(PRECISIONS)), st.sampled_from(sorted(RECIPES)),
       st.integers(0, 2), st.integers(1, 512))
def test_sharding_more_never_uses_more_memory(n: int, dtype: str, optimizer: str, stage: int, ranks: int) -> None:
    total = training_state(n, dtype, optimizer, zero_stage=stage, num_shards=ranks).total
    assert training_state(n, dtype, optimizer, zero_stage=stage + 1, num_shards=ranks).total <= total
    assert training_state(n, dtype, optimizer, zero_stage=stage, num_shards=2 * ranks).total <= total


def test_uneven_shards_count_the_largest() -> None:
    assert training_state(10, "float32", "sgd", zero_stage=3, num_shards=3).parameters == 4 * 4


def test_factored_state() -> None:
    """Adafactor keeps a row and a column: 30 + 20 numbers for a 30 x 20 matrix."""
    assert training_state(600, "float32", "adafactor", row_and_column=50).optimizer == 50 * 4
    assert training_state(1, "float32", "adafactor", row_and_column=50).optimizer == 4


def test_optimizer_steps_are_memory_bound() -> None:
    device = Cluster.load("h100-sxm", software="none").device
    seconds = memory.optimizer_step_s(1e9, "float32", "adamw", device)
    assert seconds == pytest.approx(1e9 * 28 / (3.35e12 * 0.85))    # reads p, g, m, v; writes p, m, v
    assert memory.optimizer_step_s(1e9, "float32", "sgd", device) < seconds
    assert memory.optimizer_step_s(np.array([1e9, 2e9]), "bfloat16-master", "adamw", device).shape == (2,)


def test_defect_memory_summed_without_liveness() -> None:
    """Three values of 10 bytes, of which two live at once."""
    assert peak_bytes([0, 1, 2], [2, 3, 4], [10, 10, 10]) == 20
    assert peak_bytes([0, 1], [1, 2], [10, 10]) == 10    # one ends where the other starts
    assert peak_bytes([0, 5], [0, 6], [100, 1]) == 1     # never alive
    assert peak_bytes([], [], []) == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 100)), max_size=12))
def test_peak_is_the_fullest_moment(values: list[tuple[int, int, int]]) -> None:
    starts, ends, sizes = [v[0] for v in values], [v[1] for v in values], [v[2] for v in values]
    by_hand = max((sum(z for s, e, z in values if s <= t < e) for t in range(21)), default=0)
    assert peak_bytes(starts, ends, sizes) == by_hand


def test_in_flight_micro_batches() -> None:
    assert [in_flight_micro_batches("1F1B", stage, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight_micro_batches("1f1b", 0, 4, 2) == 2
    assert in_flight_micro_batches("GPipe", 3, 4, 16) == 16


def test_errors_name_what_is_known() -> None:
    with pytest.raises(ClusterError, match=r"unknown optimizer 'nonesuch': known are .*adamw"):
        memory.recipe("nonesuch")
    with pytest.raises(ClusterError, match=r"unknown dtype 'float7': known are .*bfloat16-master"):
        memory.training_bytes(1, "float7", "adamw")
    with pytest.raises(ClusterError, match="zero_stage must be 0 to 3"):
        training_state(1, "float32", "sgd", zero_stage=4)
    with pytest.raises(ClusterError, match="known are gpipe, 1f1b"):
        in_flight_micro_batches("zigzag", 0, 1, 1)
    with pytest.raises(ClusterError, match="stages count from 0"):
        in_flight_micro_batches("1f1b", 4, 4, 1)
