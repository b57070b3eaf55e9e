"""A whole run whose rollout worker generates with vLLM, in an interpreter of its own, on two tensor-parallel ranks."""

import subprocess
from pathlib import Path

import psutil
import pytest

from infra.engines.program.process import variables_of
from tests.support.engine_checks import ENGINE_PYTHON, NEEDS_VLLM
from tests.support.progress import children_running
from tests.support.tiny import make_tiny_model
from tests.support.workplace import Workplace

pytestmark = [pytest.mark.extended, NEEDS_VLLM]


def programs_of(workplace: Workplace) -> list[psutil.Process]:
    """Return the processes of the engines' programs."""
    workers = workplace.find_workers("RolloutWorker")
    return [child for worker in workers for child in children_running("vllm_program.py", worker)]


def test_a_run_whose_engine_loses_a_rank_and_then_its_program(workplace: Workplace) -> None:
    run = workplace.run("vllm")
    make_tiny_model(workplace.folder / "vllm-model", head_dim=32)  # the smallest of vLLM's kernels on a CPU
    (workplace.folder / "vllm-venv").symlink_to(Path(ENGINE_PYTHON).parents[1])
    python = workplace.folder / "vllm-venv" / "bin" / "python"
    bare = {"cwd": "/", "env": variables_of(str(python)), "capture_output": True, "check": False}
    assert subprocess.run([python, "-c", "import vllm"], **bare).returncode == 0
    assert subprocess.run([python, "-c", "import infra"], **bare).returncode == 1
    driver = workplace.start(
        *("train", "tiny.toml", "--run-id", run.run_id, "steps=10000", "model.path=vllm-model"),
        *("rollout.kind=vllm", "rollout.cache_bytes=16777216", "rollout.temperature=0.8", "rollout.stop=['zz']"),
        *("rollout.tensor_parallel=2", "rollout.python=vllm-venv/bin/python"),
        *("runtime.max_restarts=0", "data.max_prompt_tokens=64", "eval.samples_per_prompt=2", "eval.temperature=1.0"),
    )
    driver.wait_standing(lambda: (done := run.num_done) > 0 and run.committed(done, "rollout"))
    killed_at = run.num_done
    (program,) = programs_of(workplace)
    assert "vllm-venv/bin/python" in program.cmdline()[0]
    ranks = [child for child in program.children(recursive=True) if "Worker_TP" in child.name()]
    assert len(ranks) == 2
    ranks[1].kill()  # the successor of its rollout worker starts with version 0, and is sent a later one
    driver.resume()
    driver.wait_for(lambda: run.num_done > killed_at + 1)
    driver.wait_standing(lambda: run.committed(run.num_done, "rollout"))
    killed_at = run.num_done
    (successor,) = programs_of(workplace)
    successor.kill()
    driver.resume()
    driver.wait_for(lambda: run.num_done > killed_at + 1)
    driver.terminate()
    out = driver.finish(143)
    assert "weight transport: shared_memory" in out
    assert f"vLLM's process {program.pid} is lost" in out
    assert f"vLLM's process {successor.pid} is lost: signal 9 (Killed)" in out
    for step in run.step_metrics():  # sampler and trainer agree, whatever version sampled
        assert 0 < step["mismatch/mean"] <= step["mismatch/max"] < 1e-3
    workplace.wait_for_no_workers()
    assert not [process for process in (program, successor, *ranks) if process.is_running()]
