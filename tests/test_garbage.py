"""The collector waits while we plan, and is as it was after that."""

import gc

import pytest

from autoparallel.garbage import collected_later


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
