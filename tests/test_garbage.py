"""The collector waits while we plan, and is as it was after that."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from autoparallel import garbage
from autoparallel.garbage import collected_later
from cost_models import Cluster
from tests.support.captured import plan_of


@pytest.fixture(scope="module", autouse=True)
def as_for_users() -> Iterator[None]:
    """The collector without the settings of `conftest.py`."""
    rarely = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*rarely)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_unseen", 0), ("_looked_at", garbage.FEW), ("_are_frozen", False)):
        monkeypatch.setattr(garbage, name, value)


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was_after_success_failure_and_another_within(on):
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with collected_later(), collected_later():
            assert not gc.isenabled()
        assert gc.isenabled() == on
        with pytest.raises(KeyError), collected_later():
            raise KeyError("lost")
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_what_was_made_is_old_at_once_and_what_was_frozen_stays_so(monkeypatch):
    gc.unfreeze()    # what the tests' own pauses have frozen
    with collected_later():
        kept = [[] for _ in range(10_000)]
        assert gc.get_count()[0] >= len(kept)
    assert gc.get_count()[0] < 1_000 and gc.get_freeze_count() == 0
    assert any(one is kept for one in gc.get_objects(generation=2))
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collected_later():
        pass
    assert 0 < frozen - 100 < gc.get_freeze_count() <= frozen    # threads may let go of some
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("they are counted again"))
    with collected_later():
        pass


def test_the_collector_waits_for_all_of_a_joint_search():
    on = list[bool]()
    plan_of("mlp", Cluster.load("h100-sxm", num_devices=2), joint=True, time_limit_s=0.5,
            progress=lambda *_: on.append(gc.isenabled()))
    assert on and not any(on) and gc.isenabled()


def test_garbage_of_one_plan_after_another_does_not_pile_up():
    """The collector, which does not count what was made while it waited, would never look at it."""
    class Kept:
        def __init__(self):
            self.itself = self

    gc.collect()
    each, alive = max(50_000, len(gc.get_objects()) // 4), weakref.WeakSet()
    for _ in range(8):
        with collected_later():
            garbage = [[] for _ in range(each)]
            for one in garbage:
                one.append(one)
            alive.add(Kept())
            del garbage, one
    assert len(alive) <= 4


def test_all_objects_are_counted_as_rarely_as_it_can_matter(monkeypatch):
    """They were counted after each pause, once 100,000 objects were new: that took as long as a small plan."""
    counted, count = [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    kept = []
    for _ in range(200):
        with collected_later():
            kept.append([[] for _ in range(1_000)])
    assert 1 <= sum(found > 0 for found in counted) <= 5    # else nothing is frozen, which takes no time to find
