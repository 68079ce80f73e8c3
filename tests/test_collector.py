"""The garbage collector rests while graphs are made, and is then as it was."""

import gc

import pytest

from autoshard.collector import collector_paused


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_it_was_even_after_an_error(is_enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(ValueError, match="planted"), collector_paused():
            with collector_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError("planted")
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
