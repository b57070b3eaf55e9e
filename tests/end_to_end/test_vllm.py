"""A whole run whose rollout worker generates with vLLM, on two tensor-parallel ranks."""

import importlib.util

import pytest

from tests.support.tiny import make_tiny_model
from tests.support.workplace import Workplace

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM (extra `cpu`) is not installed"),
]


def test_a_run_whose_engine_loses_a_rank(workplace: Workplace) -> None:
    run = workplace.run("vllm")
    make_tiny_model(workplace.folder / "vllm-model", head_dim=32)  # the smallest of vLLM's kernels on a CPU
    driver = workplace.start(
        *("train", "tiny.toml", "--run-id", run.run_id, "steps=10000", "model.path=vllm-model"),
        *("rollout.kind=vllm", "rollout.cache_bytes=16777216", "rollout.temperature=0.8", "rollout.stop=['zz']"),
        "rollout.tensor_parallel=2",
        *("runtime.max_restarts=0", "data.max_prompt_tokens=64", "eval.samples_per_prompt=2", "eval.temperature=1.0"),
    )
    driver.wait_standing(lambda: (done := run.num_done) > 0 and run.committed(done, "rollout"))
    killed_at = run.num_done
    children = [child for worker in workplace.find_workers("RolloutWorker") for child in worker.children()]
    ranks = [child for child in children if "Worker_TP" in child.name()]
    assert len(ranks) == 2
    ranks[1].kill()  # the successor of its rollout worker starts with version 0, and is sent a later one
    driver.resume()
    driver.wait_for(lambda: run.num_done > killed_at + 1)
    driver.terminate()
    out = driver.finish(143)
    assert "weight transport: shared_memory" in out
    assert "vLLM's 2 tensor-parallel processes failed, and were ended" in out
    for step in run.step_metrics():  # sampler and trainer agree, whatever version sampled
        assert 0 < step["mismatch/mean"] <= step["mismatch/max"] < 1e-3
    workplace.wait_for_no_workers()
    assert not [rank for rank in ranks if rank.is_running()]
