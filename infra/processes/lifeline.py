"""The lifeline: standard input, a pipe that the parent holds open and never writes to; when it closes, all is killed.

As a program, `python lifeline.py PROGRAM ARGUMENT ...`, it runs another program that ends with its parent, too. It
needs the standard library only, so that it runs in any interpreter.
"""

import fcntl
import os
import runpy
import select
import signal
import sys

LIFELINE = 0


def end_with_parent() -> None:
    """Make the kernel kill this process and its children when the lifeline closes.

    The kernel signals the whole process group, and the signal's default action needs no Python: even code that holds
    the interpreter is killed.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(LIFELINE, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(LIFELINE, fcntl.F_SETFL, fcntl.fcntl(LIFELINE, fcntl.F_GETFL) | os.O_ASYNC)
    lifeline = select.poll()
    lifeline.register(LIFELINE, 0)
    if lifeline.poll(0):  # it has closed already
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
