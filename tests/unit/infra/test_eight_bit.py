"""AdamW with 8-bit moments: the same for every sharding, and near AdamW."""

import sys

import pytest
import torch
from torch import Tensor, nn

from rl_core.training.eight_bit import has_eight_bit_moments, moment_bytes
from rl_core.training.optimizer import make_optimizer
from schemas.config.optim import OptimConfig
from schemas.errors import ConfigError
from tests.support.eight_bit_ranks import OPTIM


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice-rl\[bitsandbytes\]'"):
        make_optimizer(nn.Linear(2, 2), OPTIM)


def test_moments_are_not_both_in_8_bits_and_offloaded() -> None:
    with pytest.raises(ValueError, match="set one of the two"):
        OptimConfig(implementation="8bit", offload=True)


def test_no_row_shares_a_block_with_another() -> None:
    assert [has_eight_bit_moments(torch.empty(shape)) for shape in ((3, 512), (4, 2, 128), (3, 384), (512,))] == [
        True, True, False, False,
    ]  # fmt: skip
    assert moment_bytes(torch.empty(3, 512), 2) == 2 * (2 * 512 + 2 * 2 * 4)
    assert moment_bytes(torch.empty(3, 384), 3) == 2 * 4 * 3 * 384


def trained(config: OptimConfig, rows: list[int]) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return a weight [24, 512] after five updates, as parts of so many rows each."""
    generator = torch.Generator().manual_seed(0)
    parts = [nn.Parameter(part.clone()) for part in torch.randn(24, 512, generator=generator).split(rows)]
    optimizer = make_optimizer(nn.ParameterList(parts), config)
    for _ in range(5):
        gradient = torch.randn(24, 512, generator=generator)
        for part, its_gradient in zip(parts, gradient.split(rows), strict=True):
            part.grad = its_gradient
        optimizer.step()
    return torch.cat([part.detach() for part in parts]), optimizer


def test_updates_are_near_adamws_and_the_same_for_every_sharding() -> None:
    pytest.importorskip("bitsandbytes")
    start, _ = trained(OPTIM.replace(lr=1e-30, weight_decay=0), [24])
    expected, _ = trained(OPTIM.replace(implementation="auto"), [24])
    whole, optimizer = trained(OPTIM, [24])
    assert torch.equal(whole, trained(OPTIM, [7, 7, 7, 3])[0])
    assert (whole - expected).norm() < 0.02 * (expected - start).norm()
    [state] = optimizer.state.values()
    num_bytes = sum(value.nbytes for name, value in state.items() if name != "step")
    assert num_bytes == moment_bytes(whole, 24) == 24 * 512 * 2 * (1 + 4 / 256)
