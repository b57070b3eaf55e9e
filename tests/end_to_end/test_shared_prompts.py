"""The same run with each prompt once in a micro-batch, and with each sample's own: equal rewards, near weights."""

import pytest
import torch

from infra.checkpoints.store import CheckpointStore
from infra.stores.offline import read_step
from schemas.plan import UpdatePlan
from tests.support.run_results import Run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, UPDATES, NEAR = 3, 2, 1e-5
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "kl.coef=0.01", "loss.behavior=recompute", "store.keep_steps=all"),
    *(f"optim.updates_per_step={UPDATES}", "packing.token_budget=150"),
)
OF_ENGINE = ("sample_id", "policy_version", "prompt_ids", "response_ids", "loss_mask", "reward", "advantages")
OF_POLICY = ("behavior_logprobs", "reference_logprobs")


@pytest.fixture(scope="module")
def runs(workplace: Workplace) -> tuple[Run, Run]:
    """A run that shares prompts, and the same one that doesn't."""
    for share in ("true", "false"):
        workplace.sluice(*CONFIG, f"packing.share_prompts={share}", "--run-id", f"share-{share}")
    return workplace.run("share-true"), workplace.run("share-false")


def updates_of(run: Run, step: int) -> tuple[UpdatePlan, ...]:
    plan = run.plans.load(step)
    assert plan is not None
    return plan.updates


def test_both_train_on_the_same_rows_in_fewer_micro_batches_if_prompts_are_shared(runs: tuple[Run, Run]) -> None:
    for step in range(STEPS):
        shared, own = (updates_of(run, step) for run in runs)
        assert len(shared) == len(own) == UPDATES
        for ours, theirs in zip(shared, own, strict=True):
            assert sorted(ours.rows) == sorted(theirs.rows)
            assert ours.num_tokens < theirs.num_tokens
            assert ours.num_micros < theirs.num_micros


def test_rewards_are_equal_and_log_probs_and_weights_near(runs: tuple[Run, Run]) -> None:
    for step in range(STEPS):
        shared, own = (read_step(run.path, step, columns=(*OF_ENGINE, *OF_POLICY)) for run in runs)
        assert shared.select(OF_ENGINE).equals(own.select(OF_ENGINE))
        assert len(set(shared["reward"].to_pylist())) > 1
        for name in OF_POLICY:
            ours, theirs = (torch.tensor(rows[name].combine_chunks().flatten().to_numpy()) for rows in (shared, own))
            torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=NEAR)
    rewards = [[metrics["reward"] for metrics in run.step_metrics()] for run in runs]
    assert rewards[0] == rewards[1]
    evaluated = [[report.reward for report in run.evaluations()] for run in runs]
    assert evaluated[0] == evaluated[1]
    shared_store, own_store = (CheckpointStore(str(run.path / "policy")) for run in runs)
    for name in own_store.tensor_names(STEPS):
        ours, theirs = (store.read(STEPS, name).double() for store in (shared_store, own_store))
        assert float((ours - theirs).norm()) <= NEAR * float(theirs.norm()), name
