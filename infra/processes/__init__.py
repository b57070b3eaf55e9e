"""Processes: those for other people's code, which can be killed and end with their parent; garbage in our own."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 70_000  # new objects between two searches; Python's is 700


def take_all_files() -> int:
    """Let this process have as many files and sockets open as it may ask for; return how many it could have."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return before


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Look for reference cycles a hundred times less often during the block, and only among what is made in it.

    A plan for a thousand ranks is made of 100,000 objects, all of which stay: every search would visit them in vain,
    which takes up to half of the time of planning. Importing torch and transformers makes a million, and takes a fifth
    less time.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
