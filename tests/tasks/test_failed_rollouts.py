"""A step with too many failures: what environments answered is asked again only if environments failed."""

from pathlib import Path

import pytest

from infra.storage.runs import RunDirectory
from schemas.errors import RewardFailureError
from schemas.metrics import Sum
from schemas.rollout import RolloutShard
from schemas.step import PolicyHandle, RunHandle
from tasks.rollout import _check_failures
from tests.configs import run_config

POLICY = PolicyHandle(run_id="run", version=3, incarnation="w")


@pytest.mark.parametrize(("failed", "steps_left"), [(2, []), (0, [3])])
def test_recorded_failures_do_not_stop_a_resumed_run_again(tmp_path: Path, failed: int, steps_left: list[int]) -> None:
    config = run_config(tmp_path, environment={"kind": "class", "path": "game:Game"})
    run = RunHandle(run_id="run", directory=str(tmp_path), config=config, store_incarnation="s")
    journals = RunDirectory.of(run).journals
    journals.begin(3, 0).append("line\n")
    shard = RolloutShard(
        shard=0,
        worker=0,
        groups=(0,),
        rewards=(None, None),
        group_ids=(0, 0),
        prompt_lengths=(1, 1),
        response_lengths=(1, 1),
        loss_tokens=(1, 1),
        truncated=(0, 0),
        parts={},
        failure="no answer",
        turns={"turns/failed": Sum(value=failed)},
        seconds={},
    )
    with pytest.raises(RewardFailureError):
        _check_failures(run, POLICY, [[shard]])
    assert journals.steps() == steps_left
