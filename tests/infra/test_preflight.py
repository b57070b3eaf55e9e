"""What is refused before anything is started."""

import pytest

from infra.preflight import check_store
from schemas.config.store import FsspecStore, RayStore, TieredStore
from schemas.errors import ConfigError


def test_a_store_that_nothing_here_can_reach_is_refused() -> None:
    for config in (RayStore(), TieredStore(), FsspecStore(url="memory://columns"), TieredStore(url="s3://bucket/runs")):
        check_store(config)
    with pytest.raises(ConfigError, match=r"store\.url = 'nosuch://x' can't be opened: .*nosuch.*sluice\[s3\]"):
        check_store(TieredStore(url="nosuch://x"))
