"""The lifeline: a pipe that the parent holds open and never writes to; when it closes, all is killed.

A process gets it as standard input, and moves it away, so that what reads standard input finds its end.

As a program, `python lifeline.py PROGRAM ARGUMENT ...`, it runs another program that ends with its parent, too, and
whose shared memory is then gone. It needs the standard library only, so that it runs in any interpreter.
"""

import fcntl
import os
import runpy
import select
import signal
import sys

STANDARD_INPUT = 0
MARK = "SLUICE_ENGINE"  # the variable by which what a program has started is found, and killed


def end_with_parent(*, with_programs: bool = False) -> None:
    """Make the kernel kill this process and its children when the lifeline closes.

    The kernel signals the whole process group, and the signal's default action needs no Python: even code that holds
    the interpreter is killed.

    Args:
        with_programs: Whether that holds for a program, too, that takes this one's place.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    lifeline = os.dup(STANDARD_INPUT)
    os.set_inheritable(lifeline, with_programs)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, STANDARD_INPUT)
    os.close(empty)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    if with_programs:  # which may handle SIGIO, as Go's do
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):  # it has closed already
        sys.exit(1)


def lead_group() -> None:
    """Lead a process group, outside of which what this process and its children leave in shared memory is removed.

    Python's tracker of it removes the segments and semaphores of `multiprocessing` once all of them have ended. In
    their group, or with their mark, it would be killed with them.
    """
    from multiprocessing import resource_tracker

    own = dict(os.environ)
    os.environ.pop(MARK, None)
    os.environ |= {"PYTHONWARNINGS": "ignore", "PYTHONSAFEPATH": "1"}  # it would warn of what it removes
    resource_tracker.ensure_running()
    os.environ.clear()
    os.environ |= own
    os.setpgid(0, 0)


if __name__ == "__main__":
    lead_group()
    end_with_parent()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
