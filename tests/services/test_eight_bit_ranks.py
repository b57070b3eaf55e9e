"""AdamW with 8-bit moments in ranks as processes: resumed bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore
from tests.support.eight_bit_ranks import make_model, step


@pytest.mark.extended
def test_any_number_of_ranks_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    subprocess.run([sys.executable, "-m", "tests.support.eight_bit_ranks", str(tmp_path)], check=True)
    model, optimizer = make_model()
    restore_policy(CheckpointStore(str(tmp_path / "by-two")), 1, model, optimizer)
    for seed in (3, 4):
        step(model, optimizer, seed)
    uninterrupted, its_optimizer = make_model()
    for seed in (1, 2, 3, 4):
        step(uninterrupted, its_optimizer, seed)
    expected = policy_tensors(uninterrupted, its_optimizer)
    for resumed in (policy_tensors(model, optimizer), *(load_file(path) for path in tmp_path.glob("*/after.*"))):
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[name]) for name, value in expected.items() if name != "rng/torch")
