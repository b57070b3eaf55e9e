"""Runs a model's Python code in a process with limits; `infra.integrations.python_tool:python` is a tool's path.

The limits stop what a policy does by accident, or learns to do: endless loops, too much memory, huge files, processes
and fork bombs, use of the network, signals to other processes, and reading the run's environment variables from
`os.environ`. They are no protection against an attacker, nor do they hide files. The code runs as the run's user: it
can read what that user can read (with /proc, another process's environment variables, unless that user is root),
change that user's files, and fill the disk with many files. For code that nobody may trust, run in a container that
holds nothing else.

It needs Linux on x86_64 or aarch64.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass
from typing import IO

OUTPUT_CHARACTERS = 10_000


@dataclass(frozen=True)
class Limits:
    """What code may use."""

    cpu_seconds: int = 10
    wall_seconds: int = 20
    memory_bytes: int = 2**30  # of addresses, so the interpreter's libraries count
    file_bytes: int = 2**24  # of each file
    open_files: int = 64


LIMITS = Limits()


def python(code: str) -> str:
    """Run Python code in a fresh interpreter, and return what it prints, errors included.

    Nothing is kept between two calls. The code has 10 s of CPU time, 1 GiB of memory, files of up to 16 MiB in an
    empty current directory, no network, and can't start processes.

    Args:
        code: The program; print what you want to see.

    Returns:
        What the program printed.
    """
    return run_python(code, LIMITS)


def run_python(code: str, limits: Limits) -> str:
    """Run code under limits, and return its output, cut at `OUTPUT_CHARACTERS`, and which limit stopped it.

    Args:
        code: The program, for a fresh interpreter's standard input.
        limits: What it may use.

    Raises:
        RuntimeError: The process can't be limited here, or the interpreter doesn't start under these limits.
    """
    if platform.machine() not in _CALLS or sys.platform != "linux":
        raise RuntimeError(f"code can be run under limits on Linux on {' and '.join(_CALLS)} only")
    with (
        tempfile.TemporaryDirectory(prefix="python-tool-") as folder,
        tempfile.TemporaryFile(buffering=0) as source,
        tempfile.TemporaryFile(buffering=0) as output,
    ):
        source.write(code.encode())
        source.seek(0)
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, astuple(limits))]
        with subprocess.Popen(
            command,
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        ) as process:
            in_time = _ends(process, limits.wall_seconds)
        if process.returncode > 0 and source.tell() == 0:  # it has not read the code
            raise RuntimeError(f"Python can't be started under limits: {_text(output)}")
        text = _text(output)
        return _with_note(text, _note(process.returncode if in_time else None, text, limits))


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process ends in time, and kill it if it doesn't; it has no children."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        process.kill()


def _environment(folder: str) -> dict[str, str]:
    threads = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # With a fixed order of sets, a lost environment process's repeated calls have the same results.
    return {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", **threads}


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read(4 * OUTPUT_CHARACTERS + 4).decode(errors="replace")  # a character has up to 4 bytes


def _note(code: int | None, text: str, limits: Limits) -> str:
    """Return how a program ended, where its output doesn't say it; without an exit code, it was not in time."""
    if code is None:
        return f"Stopped: it ran for more than {limits.wall_seconds} s."
    if code == -signal.SIGXCPU:
        return f"Stopped: it used more than {limits.cpu_seconds} s of CPU time."
    if code < 0:
        return f"Stopped by {signal.Signals(-code).name}."
    if text.rstrip().endswith("MemoryError"):
        return f"It may use {limits.memory_bytes >> 20} MiB of memory."
    if text.rstrip().endswith(os.strerror(errno.EFBIG)):
        return f"A file may have {limits.file_bytes >> 20} MiB."
    return f"Exit code {code}." if code > 1 else ""  # with 1, an exception is printed


def _with_note(text: str, note: str) -> str:
    longest = OUTPUT_CHARACTERS - 100  # leaves room for the notes
    if len(text) > longest:
        text = f"{text[:longest]}\n(The output is cut at {longest:,} characters.)\n"
    return f"{text}\n{note}" if text and note and not text.endswith("\n") else text + note


# Of each machine: AUDIT_ARCH, then system calls: clone, clone3, those for the process itself only, those for nobody.
# The last are fork, vfork, x86's variants with other numbers, socket, io_uring_setup (which makes sockets, too), and
# what signals or writes to other processes: tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, ptrace,
# process_vm_writev.
_CALLS = {
    "x86_64": (0xC000003E, 56, 435, (62, 234), (57, 58, 41, 425, 200, 129, 297, 424, 101, 311)),
    "aarch64": (0xC00000B7, 220, 435, (129, 131), (198, 425, 130, 138, 240, 424, 117, 271)),
}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD, _X32 = 0x10000, 0x40000000
_PDEATHSIG, _SECCOMP, _READ_CAPABILITY, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES = 1, 22, 23, 24, 38  # of prctl
_SECCOMP_FILTER = 2
_FILE_CAPABILITIES = (1, 2)  # of root, to read an interpreter that is another user's


def _filter(pid: int) -> list[tuple[int, int, int, int]]:
    """Return the seccomp program of a process: it may start threads, but no process, and signal itself only."""
    machine, clone, clone3, own, denied = _CALLS[platform.machine()]
    fail, allow = (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    program = [
        (_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), fail,
        (_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS),  # then libc uses clone
        (_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 1, 0, _CLONE_THREAD), fail, allow,
    ]  # fmt: skip
    for number in own:
        program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 1, 0, pid), fail, allow]
    for number in denied:
        program += [(_EQUAL, 0, 1, number), fail]
    return [*program, allow]


def _confine(parent: int, limits: Limits) -> None:
    """Limit this process, and all that it will execute."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(option: int, *values: int) -> None:
        if libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])):
            raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")

    prctl(_PDEATHSIG, signal.SIGKILL)  # if the parent ends, however it ends
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    for capability in range(64) if os.geteuid() == 0 else ():  # with them, root could raise its limits
        if capability not in _FILE_CAPABILITIES and libc.prctl(_READ_CAPABILITY, capability, 0, 0, 0) == 1:
            prctl(_DROP_CAPABILITY, capability)
    for resource_id, soft, hard in (
        (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 1),  # SIGXCPU, which can be ignored; SIGKILL
        (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(resource_id, (soft, hard))
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in _filter(os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(buffer)))
    prctl(_NO_NEW_PRIVILEGES, 1)
    prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(header))


if __name__ == "__main__":
    _confine(int(sys.argv[1]), Limits(*map(int, sys.argv[2:])))
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []  # the folder is empty when the code starts
    os.execv(sys.executable, [sys.executable, *safe_path, "-s", "-u", "-"])
