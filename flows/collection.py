"""Python's garbage collector in the driver."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FACTOR = 100


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles a hundred times less often during the block, and only among what is made in it.

    A plan for a thousand ranks is made of 100,000 objects, all of which stay: every search would visit them in vain,
    which takes up to half of the time of planning.
    """
    first, *others = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(FACTOR * first, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
        gc.unfreeze()
