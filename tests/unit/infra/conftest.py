"""Fixtures that several test modules of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.reward_pools import REWARDS, OpenPool, opened_pools


@pytest.fixture
def process_group() -> Iterator[None]:
    """End the process group of this process, over which a mesh or modules in bfloat16 are sharded."""
    yield
    dist.destroy_process_group()


@pytest.fixture
def reward_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the functions of `pool_rewards` log the completions that they are called with, one per line."""
    (tmp_path / "pool_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def open_pool(reward_calls: Path) -> Iterator[OpenPool]:
    """Opens reward pools that are closed at the end of the test."""
    with opened_pools() as open_one:
        yield open_one
