"""The lifeline: a pipe that the parent holds open and never writes to; when it closes, all is killed.

A process gets it as standard input, and moves it away, so that what reads standard input finds its end.

As a program, `python lifeline.py PROGRAM ARGUMENT ...`, it runs another program that ends with its parent, too. It
needs the standard library only, so that it runs in any interpreter.
"""

import fcntl
import os
import runpy
import select
import signal
import sys

STANDARD_INPUT = 0


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


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
