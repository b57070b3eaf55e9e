import pytest
from pydantic import ValidationError

from schemas.batch import ChunkKey
from schemas.catalog import CATALOG, column_spec
from schemas.errors import ColumnError


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "a b", "a\n"])
def test_a_key_part_that_could_leave_the_run_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="not a safe name"):
        ChunkKey(run_id=name, step=0, stage="rollout")
    with pytest.raises(ValidationError, match="not a safe name"):
        ChunkKey(run_id="run", step=0, stage=name)


def test_a_key_is_deterministic() -> None:
    assert str(ChunkKey(run_id="run-1", step=7, stage="rollout", shard=2)) == "run-1/7/rollout/2/0"


def test_reward_parts_share_the_reward_column_s_entry() -> None:
    assert column_spec("reward_format").dtypes == CATALOG["reward"].dtypes
    with pytest.raises(ColumnError, match="'rewards' is not in the catalogue"):
        column_spec("rewards")
    with pytest.raises(ColumnError):
        column_spec("reward_")
