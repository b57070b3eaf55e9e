"""The code of docs/how-to/other-trainers.md, run as it stands against a real store."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.rl_core.padded_batches import assert_same, trl_batch, verl_batch

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-trainers.md"


@pytest.mark.extended
def test_the_code_of_the_page_runs(ray_cluster: None) -> None:
    uids = ["a", "b", "c", "d"]
    proto = SimpleNamespace(batch=verl_batch(), non_tensor_batch={"uid": uids})
    names: dict[str, Any] = {"proto": proto, "inputs": trl_batch()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    try:
        for block in blocks[:-1]:
            exec(block, names)
        restored = names["batch"]
        assert restored.pop("uid") == uids
        assert_same(restored, verl_batch())
        assert names["ids"].num_rows == 2
        exec(blocks[-1], names)
        assert_same(names["inputs"], trl_batch())
    finally:
        names["store"].close()
