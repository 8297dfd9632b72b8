"""Ranks meet at the job's store: those that do not come, come twice, or find another program there are told by name."""

from __future__ import annotations

import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from autoparallel.errors import LaunchError
from autoparallel.launch import meeting
from autoparallel.launch.environment import Identity
from autoparallel.launch.local import free_port
from autoparallel.launch.meeting import store_of


def met(size: int, ranks: list[int], port: int, timeout_s: float = 1.5) -> list[str]:
    """The errors of these ranks, "" of those that meet. (Threads: a store's other end may be in the same process.)"""

    def one(rank: int) -> str:
        try:
            stores.append(store_of(Identity("torchrun", rank, size, None, None, "127.0.0.1", port),
                                   timedelta(seconds=timeout_s)))
        except LaunchError as error:
            return str(error)
        return ""

    stores: list[object] = []                                # rank 0's serves the others
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_all_come() -> None:
    assert met(3, [2, 0, 1], free_port(), timeout_s=60.0) == ["", "", ""]


def test_ranks_that_do_not_come_are_named_on_those_that_do(caplog: pytest.LogCaptureFixture,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_TELL_S", 0.2)
    with caplog.at_level(logging.WARNING, "autoparallel"):
        found = met(4, [0, 2], port := free_port())
    said = f"ranks 1, 3 of 4 did not come to rank 0 at 127.0.0.1:{port} in 1.5 s"
    assert all(text.startswith(said) for text in found)
    assert re.search(f"rank 0 waits at 127.0.0.1:{port} for ranks 1, (2, )?3 of 4", caplog.text)


def test_a_rank_0_that_does_not_answer() -> None:
    (text,) = met(2, [1], port := free_port(), timeout_s=0.5)
    assert text.startswith(f"rank 1 of 2 does not reach rank 0 at 127.0.0.1:{port} in 0.5 s (timeout_s)")


def test_two_processes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(7001, 7009))
    monkeypatch.setattr(meeting.os, "getpid", lambda: next(numbers))
    found = met(3, [0, 1, 1], free_port())
    (twice,) = [text for text in found if "two processes say that they are rank 1 of 3" in text]
    assert "each needs a rank of its own" in twice
    assert sum("rank 2 of 3 did not come" in text for text in found) == 2


def test_another_program_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and says nothing, for which torch waits without limit."""
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.5)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = int(other.getsockname()[1])
        taken, unanswered = met(2, [0, 1], port, timeout_s=0.5)
    assert taken.startswith(f"port {port} of rank 0's host is taken, by another program or another rank 0")
    assert "another program listens there (set MASTER_PORT)" in unanswered
