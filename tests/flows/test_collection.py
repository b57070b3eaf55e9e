"""Garbage collection in the driver."""

import gc
from contextlib import suppress

from flows.collection import rare_collections


def test_collections_are_rare_in_the_block_alone() -> None:
    before = gc.get_threshold()
    with suppress(ValueError), rare_collections():
        assert gc.get_threshold() == (100 * before[0], *before[1:])
        assert gc.get_freeze_count()
        raise ValueError
    assert gc.get_threshold() == before
    assert not gc.get_freeze_count()
