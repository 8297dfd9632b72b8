"""Known answers of the traffic through parameter servers, and of uneven workers."""

from __future__ import annotations

import numpy as np
import pytest

from cost_models import Link
from cost_models.servers import ServerTraffic, server_step_s, stale_step_s

LINK = Link("wire", 64, 0.0, 1e9)


@pytest.mark.parametrize(("workers", "servers", "seconds"), [(4, 4, 2.0), (8, 2, 8.0), (2, 4, 2.0), (1, 1, 2.0)])
def test_dense_parameters_cross_the_busiest_link_twice(workers: int, servers: int, seconds: float) -> None:
    """2 P bytes by a worker's link, and n 2 P / m by a server's; a ring's 2 P (n - 1) / n is always less."""
    made = server_step_s(ServerTraffic(1e9, 0.0, 0.0), workers, servers, LINK)
    assert made == pytest.approx(seconds)
    assert made > 2.0 * (workers - 1) / workers


def test_rows_take_their_ids_with_them_and_messages_take_time() -> None:
    traffic = ServerTraffic(0.0, 4e6, 1e6)
    assert (traffic.pulled_bytes, traffic.pushed_bytes) == (5e6, 5e6)
    slow = Link("wire", 64, 0.01, 1e9)
    assert server_step_s(traffic, 2, 2, slow) == pytest.approx(2 * 5e-3 + 4 * 0.01)


def test_synchronous_steps_take_the_slowest_of_each() -> None:
    times = np.random.default_rng(0).uniform(1, 2, (5, 40))
    assert stale_step_s(times, 0) == pytest.approx(times.max(0).mean())
    assert stale_step_s(times, 40) == pytest.approx(times.sum(1).max() / 40)
    found = [stale_step_s(times, staleness) for staleness in (0, 1, 2, 4, 8)]
    assert found == sorted(found, reverse=True) and found[0] > 1.1 * found[-1]


def test_a_worker_that_is_always_slower_sets_the_pace() -> None:
    """Bounded staleness hides variation, no constant difference: two steps of 1 s ahead, then all take 2 s."""
    times = np.ones((3, 100))
    times[1] = 2
    assert stale_step_s(times, 0) == stale_step_s(times, 2) == pytest.approx(2.0)
