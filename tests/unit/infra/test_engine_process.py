"""The process of an engine's program: what it answers, and what becomes of one that misbehaves."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from infra.engines.program.process import CallFailedError, EngineProcess
from infra.engines.vllm.installation import PROGRAM
from schemas.errors import EngineLostError, WorkerLostError
from tests.support.odd_engine import BEHAVIOUR, ODD, open_odd_engine
from tests.support.progress import wait_until
from tests.support.site_on_loopback import run_with_shared_memory

HOST = """
import sys
from tests.support.odd_engine import open_odd_engine
process = open_odd_engine(open="share")
print(process.pid, *process.call("open")[0]["shared"], flush=True)
sys.stdin.read()
"""
FULL = """
from tests.support.odd_engine import open_odd_engine
process = open_odd_engine(step="overfill")
try:
    process.call("step")
except Exception as error:
    print(type(error).__name__, str(error).split("\\n")[0])
"""
NUM_SHARED = 2  # a segment and a semaphore


def test_a_call_returns_its_result_and_its_buffers() -> None:
    process = open_odd_engine(ask='{"answer": 42}')
    sent = [np.arange(1000, dtype=np.int32), np.empty(0, dtype=np.float32), b"abc"]
    result, buffers = process.call("ask", {"question": "?"}, sent)
    assert result == {"answer": 42}
    assert [bytes(buffer) for buffer in buffers] == [bytes(memoryview(each).cast("B")) for each in sent]
    process.close()
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(EngineLostError, match="was ended"):
        process.call("ask")


def test_a_failed_call_says_why_and_the_next_one_is_answered() -> None:
    process = open_odd_engine(wake="raise out of memory")
    with pytest.raises(CallFailedError, match="out of memory") as caught:
        process.call("wake")
    assert caught.value.type == "RuntimeError"
    assert process.call("sleep") == ({}, [])
    process.close()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("die the last words", r"is lost: exit code 3; its last lines:\n  the last words"),
        ("garbage", r"was killed: it answered a header that is not a JSON object with sizes: b'oops'"),
        ("hang", r"was killed: it has not answered 'step' within 0.5 s \(timeouts.engine_seconds\)"),
        ("half", r"was killed: it has not answered 'step' within 0.5 s \(timeouts.engine_seconds\)"),
        ("[]", r"was killed: it answered without a result"),
    ],
)
def test_one_that_misbehaves_is_lost_with_its_last_lines(behaviour: str, said: str) -> None:
    process = open_odd_engine(seconds=0.5 if behaviour.startswith("ha") else 600, step=behaviour)
    with pytest.raises(EngineLostError, match=said):
        process.call("step")
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(EngineLostError, match=said):
        process.check()


def test_one_that_is_killed_is_lost() -> None:
    process = open_odd_engine(step="hang")
    process.call("hello")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"signal 9 \(Killed\)"):
        process.call("step")


def test_one_that_is_killed_as_it_starts_is_a_lost_worker_and_one_that_ends_is_not() -> None:
    process, said = open_odd_engine(start="killed busy"), r"is lost: signal 9 \(Killed\); its last lines:\n  busy$"
    with pytest.raises(WorkerLostError, match=said) as caught, process.ended_on_error():
        process.call("start")
    assert not isinstance(caught.value, EngineLostError)  # of which workers are created without end
    for seconds, behaviour in ((600, "die"), (600, "[]"), (0.5, "hang")):  # the last two are killed by this process
        process = open_odd_engine(seconds, start=behaviour)
        with pytest.raises(EngineLostError), process.ended_on_error():
            process.call("start")


def test_its_last_words_begin_with_why_it_is_lost() -> None:
    process = open_odd_engine(wake="print x", step="[]")
    process.call("wake")
    with pytest.raises(EngineLostError):
        process.call("step")
    assert process.last_words == "it answered without a result: " + 200 * "x"


def test_a_rank_of_vllm_keeps_the_path_that_it_gets_and_finds_its_methods(tmp_path: Path) -> None:
    for name in ("frames", "vllm_ranks"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('another module')")
    (tmp_path / "first.py").touch()
    script = (  # as multiprocessing's spawn does
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__mp_main__'); assert 'torch' not in sys.modules; "
        "import first; from sluice_vllm_ranks import RankMethods; print(RankMethods.process_id(None))"
    )
    command = [sys.executable, "-P", "-c", script, str(PROGRAM)]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.communicate()[0] == f"{rank.pid}\n"


def test_what_it_prints_is_no_answer() -> None:
    process = open_odd_engine(step="print " + "x" * 1000)
    for _ in range(3):
        assert process.call("step", buffers=[b"tokens"]) == ({}, [bytearray(b"tokens")])
    process.close()


def test_it_ends_with_a_killed_host_and_leaves_no_shared_memory() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pid, *shared = host.stdout.readline().split()
    assert psutil.pid_exists(int(pid))
    assert len(shared) == NUM_SHARED
    assert all(map(os.path.exists, shared))
    host.kill()
    host.wait()
    wait_until(lambda: not psutil.pid_exists(int(pid)) and not any(map(os.path.exists, shared)))


@pytest.mark.parametrize("way", ["it is closed", "it is killed", "it hangs"])
def test_however_it_ends_it_leaves_no_shared_memory(way: str) -> None:
    process = open_odd_engine(0.5 if way == "it hangs" else 600, open="share", step="hang")
    shared = process.call("open")[0]["shared"]
    assert len(shared) == NUM_SHARED
    if way == "it is closed":
        process.close()
    else:
        if way == "it is killed":
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError) as caught:
            process.call("step")
        assert "shared_memory" not in str(caught.value)  # which is removed without a word
    assert not any(map(os.path.exists, shared))


def test_one_that_shared_memory_has_no_space_for_says_so_in_its_first_line() -> None:
    said = run_with_shared_memory("4m", [sys.executable, "-c", FULL])
    advice = r"; /dev/shm has [0-4] of 4 MiB free: enlarge it \(for Docker: --shm-size; docs/cluster.md\)"
    assert re.fullmatch(rf"EngineLostError .* is lost: signal 7 \(Bus error\){advice}.*\n", said), said


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_it_starts_in_a_session_of_its_own_ends_with_it(is_killed: bool) -> None:
    process = open_odd_engine(open="leave")
    child = process.call("open")[0]["child"]
    assert os.getsid(child) == child
    if is_killed:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineLostError, match=r"signal 9 \(Killed\)"):
            process.call("step")
    else:
        process.close()
    wait_until(lambda: not psutil.pid_exists(child))


def test_an_interpreter_that_is_missing_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        EngineProcess("/nosuch/python", ODD, {BEHAVIOUR: "{}"}, "odd")
