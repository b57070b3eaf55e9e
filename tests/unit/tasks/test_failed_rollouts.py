"""A step with too many failures: what environments answered is asked again only if environments failed."""

from pathlib import Path

import pytest

from infra.storage.runs import RunDirectory
from schemas.errors import RewardFailureError
from schemas.metrics import Metrics, Sum
from schemas.rollout import RolloutShard
from schemas.step import PolicyHandle, RunHandle
from tasks.rollout import _check_failures
from tests.support.configs import run_config

POLICY = PolicyHandle(run_id="run", version=3, incarnation="w")


@pytest.mark.parametrize(("failed", "steps_left"), [(2, []), (0, [3])])
def test_recorded_failures_do_not_stop_a_resumed_run_again(tmp_path: Path, failed: int, steps_left: list[int]) -> None:
    config = run_config(tmp_path, environment={"kind": "class", "path": "game:Game"})
    run = RunHandle(run_id="run", identity="run", directory=str(tmp_path), config=config, store_incarnation="s")
    journals = RunDirectory.of(run).journals
    journals.begin(3, 0).append("line\n")
    shard = failed_shard(rewards=(None, None), turns={"turns/failed": Sum(value=failed)})
    with pytest.raises(RewardFailureError):
        _check_failures(run, POLICY, [[shard]])
    assert journals.steps() == steps_left
    assert RunDirectory.of(run).failures.load(3) == {"3-0-0": "no answer of 0", "3-0-1": "no answer of 1"}


@pytest.mark.parametrize(
    ("rewards", "warning"),
    [
        ((None, 1.0), "1 of 2 rewards of step 3 failed, and are left out; the first failure: no answer"),
        ((0.0, 1.0), None),
    ],
)
def test_failures_that_are_allowed_are_a_warning(
    tmp_path: Path, rewards: tuple[float | None, ...], warning: str | None
) -> None:
    config = run_config(tmp_path, reward={"max_failure_fraction": 0.5})
    run = RunHandle(run_id="run", identity="run", directory=str(tmp_path), config=config, store_incarnation="s")
    assert _check_failures(run, POLICY, [[failed_shard(rewards=rewards, turns={})]]) == warning
    expected = {"3-0-0": "no answer of 0"} if None in rewards else None
    assert RunDirectory.of(run).failures.load(3) == expected


def failed_shard(rewards: tuple[float | None, ...], turns: Metrics) -> RolloutShard:
    return RolloutShard(
        shard=0,
        worker=0,
        groups=(0,),
        rewards=rewards,
        group_ids=(0, 0),
        prompt_lengths=(1, 1),
        response_lengths=(1, 1),
        loss_tokens=(1, 1),
        truncated=(0, 0),
        parts={},
        failure="no answer",
        failures={f"3-0-{row}": f"no answer of {row}" for row, reward in enumerate(rewards) if reward is None},
        turns=turns,
        seconds={},
    )
