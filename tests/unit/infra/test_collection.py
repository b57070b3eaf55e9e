"""Rare garbage collections."""

import gc
from contextlib import suppress

from infra.processes import THRESHOLD, infrequent_gc


def test_collections_are_rare_in_the_block_alone() -> None:
    before = gc.get_threshold()
    with suppress(ValueError), infrequent_gc():
        with infrequent_gc():
            pass
        assert gc.get_threshold() == (THRESHOLD, *before[1:])
        raise ValueError
    assert gc.get_threshold() == before
    assert not gc.get_freeze_count()
