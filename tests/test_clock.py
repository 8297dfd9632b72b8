"""The clock of planning: time without the processor hardly counts, time in which HiGHS works for this thread does."""

from __future__ import annotations

import time

from autoparallel import clock

SLEPT_S = 0.3


def test_time_without_the_processor_counts_a_tenth() -> None:
    start, cpu = clock.now(), time.thread_time()
    time.sleep(SLEPT_S)
    assert clock.now() - start < 0.5 * SLEPT_S + time.thread_time() - cpu


def test_work_counts_in_full() -> None:
    start, cpu, wall = clock.now(), time.thread_time(), time.monotonic()
    while time.thread_time() - cpu < 0.05:
        pass
    spent = clock.now() - start
    assert 0.05 <= spent <= max(0.05, time.monotonic() - wall) + 1e-3


def test_waiting_for_a_process_that_works_for_this_one_counts_in_full() -> None:
    start = clock.now()
    with clock.waiting():
        time.sleep(SLEPT_S)
    assert clock.now() - start >= 0.99 * SLEPT_S
