"""Rows that were lost with their worker, and generated again."""

import pytest

from schemas.errors import ChunkNotFoundError
from schemas.rollout import RolloutShard
from tasks.put import _check_same_rows

SHARD = RolloutShard(
    shard=0,
    worker=0,
    groups=(0,),
    rewards=(1.0, None),
    group_ids=(0, 0),
    prompt_lengths=(3, 3),
    response_lengths=(5, 6),
    loss_tokens=(5, 6),
    truncated=(0, 1),
    seconds={"generate": 1.0},
)


def test_the_same_rows_from_another_worker_are_used() -> None:
    _check_same_rows(SHARD, SHARD.replace(worker=1, seconds={"generate": 9.0}), "shard 0 of step 4")


@pytest.mark.parametrize("other", [{"rewards": (1.0, 0.0)}, {"response_lengths": (5, 7)}])
def test_other_rows_are_not_mixed_with_the_rollout_that_describes_the_lost_ones(other: dict[str, object]) -> None:
    with pytest.raises(ChunkNotFoundError, match=r"the rows of shard 0 of step 4 were lost .* gave others"):
        _check_same_rows(SHARD, SHARD.replace(**other), "shard 0 of step 4")
