"""Sandboxed code: its output, its limits, and that nothing of it is left."""

import asyncio
import os
import subprocess
import sys
import tempfile

import psutil
import pytest

from infra.integrations import python_tool
from infra.integrations.python_tool import OUTPUT_CHARACTERS, Limits, python, run_python
from rl_core.environments.tools import ToolEnvironment, load_tools, tool_schemas
from tests.support.progress import wait_until
from tests.support.reward_pools import wait_for_exit

PATIENT_SECONDS = 1000  # on a busy machine, too
PATH = "infra.integrations.python_tool:python"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(python_tool, "LIMITS", Limits(wall_seconds=PATIENT_SECONDS))
    before = set(psutil.Process().children(recursive=True))
    yield
    assert list(tmp_path.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("", ""),
        ("print(6 * 7)", "42\n"),
        ("import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)", "1\n2\n3\n"),
        ("print('é \N{GRINNING FACE}')", "é \N{GRINNING FACE}\n"),
        ("print(__name__)\nif __name__ == '__main__': print('main')", "__main__\nmain\n"),
        ("import sys; print(repr(sys.stdin.read()))", "''\n"),
        ("import os; print(os.listdir(), os.getcwd() == os.environ['HOME'])", "[] True\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\N{REPLACEMENT CHARACTER}"),
        ("import sys; sys.exit('bye')", "bye\n"),
        ("print('x', end=''); import os; os._exit(3)", "x\nExit code 3."),
        ("import os; os.abort()", "Stopped by SIGABRT."),
        ("import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start(); t.join()", "hi\n"),
        ("import asyncio; asyncio.run(asyncio.sleep(0)); print('slept')", "slept\n"),
    ],
)
def test_the_result_is_what_the_code_prints(code: str, output: str) -> None:
    assert python(code) == output


def test_an_exception_is_printed() -> None:
    assert python("print(1)\n1 / 0").splitlines() == [
        "1",
        "Traceback (most recent call last):",
        '  File "<stdin>", line 2, in <module>',
        "ZeroDivisionError: division by zero",
    ]
    assert "SyntaxError" in python("print(")


def test_the_same_code_has_the_same_output_in_each_process() -> None:
    code = "print(set('abcdefgh'), hash('a'))"
    assert python(code) == python(code)


def test_long_output_is_cut() -> None:
    output = python("print('x' * 1_000_000)")
    assert len(output) <= OUTPUT_CHARACTERS
    assert output.endswith("x\n(The output is cut at 9,900 characters.)\n")


def test_an_endless_loop_is_stopped_and_keeps_its_output() -> None:
    output = run_python("print('begin')\nwhile True: pass", Limits(cpu_seconds=1, wall_seconds=PATIENT_SECONDS))
    assert output == "begin\nStopped: it used more than 1 s of CPU time."


def test_code_that_ignores_the_warning_is_killed() -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_python(code, Limits(cpu_seconds=1, wall_seconds=PATIENT_SECONDS)) == "Stopped by SIGKILL."


def test_code_that_only_waits_is_stopped() -> None:
    assert run_python("import time; time.sleep(1e6)", Limits(wall_seconds=1)) == "Stopped: it ran for more than 1 s."


def test_endless_output_is_stopped() -> None:
    output = run_python("while True: print('x' * 10_000)", Limits(file_bytes=2**20, wall_seconds=PATIENT_SECONDS))
    assert output.startswith("xxx")
    assert len(output) <= OUTPUT_CHARACTERS


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = bytearray(2**40)", "MemoryError\nIt may use 1024 MiB of memory."),
        ("x = []\nwhile True: x.append(bytearray(2**24))", "MemoryError\nIt may use 1024 MiB of memory."),
        ("open('big', 'wb').write(bytes(2**25))", "File too large\nA file may have 16 MiB."),
        ("open('big', 'wb').truncate(2**40)", "File too large\nA file may have 16 MiB."),
        ("files = [open(str(i), 'w') for i in range(100)]", "Too many open files: '61'\n"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))", "not allowed to raise maximum limit\n"),
        ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted\n"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError: [Errno 1] Operation not permitted\n"),
        ("import multiprocessing as m; m.Process(target=print).start()", "Operation not permitted\n"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Operation not permitted\n"),
        ("import os; os.kill(os.getppid(), 0)", "Operation not permitted\n"),
        ("import os; os.killpg(0, 0)", "Operation not permitted\n"),
    ],
)
def test_what_exceeds_a_limit_fails_and_says_so(code: str, text: str) -> None:
    assert python(code).endswith(text)


def test_a_fork_bomb_starts_no_process() -> None:
    code = """
import ctypes, os
libc, started = ctypes.CDLL(None), 0
for start in (os.fork, os.forkpty, libc.fork):
    for _ in range(3):
        try:
            pid = start()
        except OSError:
            continue
        if pid == 0:
            os._exit(0)
        started += pid != -1
print(started, os.system("true") == 0)
"""
    assert python(code).splitlines()[-1] == "0 False"


def test_the_runs_environment_variables_are_not_passed_on(monkeypatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    output = python("import os, sys; print(sorted(os.environ), '/somewhere' in sys.path)")
    assert "API_TOKEN" not in output
    assert output.endswith("False\n")


def test_code_ends_with_the_process_that_runs_it(tmp_path) -> None:
    """A pool kills an environment process that takes too long; what it has started must not go on."""
    begun = tmp_path / "begun"
    code = f"import time; open({str(begun)!r}, 'w'); time.sleep(1e6)"
    program = f"from infra.integrations.python_tool import *; run_python({code!r}, Limits(wall_seconds=10**6))"
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: begun.exists() or process.poll() is not None)
        [child] = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait()
    wait_for_exit(child.pid)
    begun.unlink()
    [folder] = tmp_path.iterdir()  # nobody was left to remove it
    folder.rmdir()


def test_it_is_a_tool() -> None:
    assert load_tools([PATH])["python"].usage == '{"code": string}'
    [schema] = tool_schemas([PATH])
    assert schema["function"]["parameters"]["required"] == ["code"]
    environment = ToolEnvironment({"prompt": [], "answer": "", "info": {}}, 0, tools=[PATH], parser="json")
    step = asyncio.run(environment.step('{"name": "python", "arguments": {"code": "print(6 * 7)"}}'))
    assert list(step.observation) == ["42\n"]
