"""Other work on the machine while something is measured."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "while True: pass"


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep as many cores busy as there are processes, during the block."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
