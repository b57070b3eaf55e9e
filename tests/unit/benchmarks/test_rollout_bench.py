"""The benchmark of rollout engines: its workloads, its plans, and its check of what engines return."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import size_of
from benchmarks.rollout.paths import Response, plain_logprobs
from benchmarks.rollout.run import Plan, _check, measure
from benchmarks.rollout.workload import make_workload
from infra.models.load import load_model
from infra.models.tiny import make_model
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError, PipelineError


def test_workloads_are_equal_or_varied() -> None:
    equal = make_workload("equal", 1024, num_prompts=8, num_samples=4, prompt_tokens=64, response_tokens=128)
    assert [len(prompt) for prompt in equal.prompts] == [64] * 8
    assert (equal.num_rows, equal.stop_token_ids) == (32, ())
    varied = make_workload("varied", 1024, num_prompts=8, num_samples=4, prompt_tokens=64, response_tokens=128)
    lengths = {len(prompt) for prompt in varied.prompts}
    assert len(lengths) > 1
    assert 32 <= min(lengths) <= max(lengths) <= 96
    assert len(varied.stop_token_ids) == 1024 // 32  # a mean of 32 tokens, where all are equally likely
    assert varied.requests(1)[0].seeds != varied.requests(2)[0].seeds


def test_wrong_responses_are_not_timed(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make_model(tmp_path, **size_of("tiny")))))
    workload = make_workload("varied", 1024, num_prompts=1, num_samples=1, prompt_tokens=8, response_tokens=16)
    assert workload.stop_token_ids[:3] == (0, 4, 8)
    token_ids = np.array([1, 2, 8])
    logprobs = plain_logprobs(model, workload.prompts[0], token_ids)
    assert _check("right", workload, [Response(token_ids, logprobs)], model) == 0
    for given_ids, given_logprobs, message in [
        (token_ids, logprobs + 0.1, "differ by 0.1 nats"),
        (token_ids[:2], logprobs[:2], "doesn't end where it should"),
        (np.array([8, 2, 8]), logprobs, "doesn't end where it should"),
        (token_ids, logprobs[:2], "2 log-probs"),
    ]:
        with pytest.raises(PipelineError, match=message):
            _check("wrong", workload, [Response(given_ids, given_logprobs)], model)
    with pytest.raises(PipelineError, match="0 responses, expected 1"):
        _check("wrong", workload, [], model)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(models=("huge",)), "--model: 'huge' is not one of tiny, small, mid"),
        (Plan(paths=("sluice", "sglang")), "--paths: 'sglang' is not one of sluice, generate"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(plan)
