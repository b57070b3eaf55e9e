"""A run whose scores are over the tokens that truncated sampling left, by two ranks, with a reference; replayed."""

import pytest

from infra.stores.offline import read_step
from tests.support.run_results import Run
from tests.support.workplace import Workplace

STEPS = 3


@pytest.fixture(scope="module")
def masked(workplace: Workplace) -> Run:
    settings = ("rollout.top_p=0.7", "rollout.min_p=0.02", "rollout.sampling_mask=true", "loss.behavior=recompute")
    others = ("kl.coef=0.05", "loss.entropy_coef=0.01", "runtime.num_policy_ranks=2", "store.keep_steps=all")
    workplace.sluice("train", "tiny.toml", f"steps={STEPS}", *settings, *others, "--run-id", "masked")
    return workplace.run("masked")


def test_engine_trainer_and_reference_score_over_the_same_tokens(masked: Run) -> None:
    for step, metrics in enumerate(masked.step_metrics()):
        assert metrics["mismatch/max"] < 1e-4
        assert (metrics["kl"] < 1e-6) == (step == 0)


def test_each_token_is_one_that_could_be_sampled(masked: Run) -> None:
    columns = ["response_ids", "sampling_mask_counts", "sampling_mask_ids", "sampler_logprobs", "behavior_logprobs"]
    for row in read_step(masked.path, STEPS - 1, columns=columns).to_pylist():
        start, ids = 0, row["sampling_mask_ids"]
        for token, count, *logprobs in zip(*(row[name] for name in columns if name != columns[2]), strict=True):
            assert token in ids[start : start + count]
            assert (count == 1) == (max(map(abs, logprobs)) < 1e-6)
            start += count
        assert start == len(ids)


def test_a_replay_has_the_same_bits(workplace: Workplace, masked: Run) -> None:
    assert "same bits" in workplace.sluice("replay", masked.run_id, "--steps", "1")
    assert (
        workplace.sluice("sql", masked.run_id, "select min(sampling_mask_counts) > 0 from tokens").split()[-1] == "True"
    )
