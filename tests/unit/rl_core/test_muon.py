"""Muon's step by NumPy in float64, next to torch's own, and which weights it trains."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.training.muon import is_matrix, matrices_of, orthogonalize
from rl_core.training.optimizer import make_optimizer
from schemas.config.optim import OptimConfig
from tests.support.families import build_family
from tests.support.packed import tiny_qwen3

LR, DECAY, MOMENTUM = 0.013, 0.3, 0.9
SHAPES = [(5, 3), (4, 4), (2, 7)]


def expected_steps(weight: NDArray[np.float64], gradients: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the weight after a step for each gradient."""
    average = np.zeros_like(weight)
    for gradient in gradients:
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        update = (1 - MOMENTUM) * gradient + MOMENTUM * average
        x = update / np.linalg.norm(update)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = (1 - LR * DECAY) * weight - 0.2 * LR * np.sqrt(max(weight.shape)) * x
    return weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_steps_by_numpy(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(5)
    start, *gradients = (generator.normal(size=shape) for _ in range(3))
    matrix = nn.Parameter(torch.from_numpy(start.astype(np.float32)))
    module = nn.ParameterList([matrix, nn.Parameter(torch.ones(2))])
    config = OptimConfig(kind="muon", lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    optimizer = make_optimizer(module, config, [matrix])
    for gradient in gradients:
        matrix.grad = torch.from_numpy(gradient.astype(np.float32))
        optimizer.step()
    expected = expected_steps(start, gradients)
    np.testing.assert_allclose(matrix.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert optimizer.state[matrix].keys() == {"momentum_buffer"}


def test_torchs_own_is_equal_up_to_its_bfloat16() -> None:
    own, theirs = (nn.Parameter(torch.eye(6, 9)) for _ in range(2))
    gradient = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    config = OptimConfig(kind="muon", lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    ours = make_optimizer(nn.ParameterList([own]), config, [own])
    torchs = torch.optim.Muon([theirs], LR, DECAY, MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for optimizer, weight in ((ours, own), (torchs, theirs)):
        weight.grad = gradient.clone()
        optimizer.step()
    moved = (theirs - torch.eye(6, 9) * (1 - LR * DECAY)).norm()
    assert (own - theirs).norm() < 0.06 * moved


def test_a_stack_is_orthogonalized_matrix_by_matrix() -> None:
    stack = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalize(stack), torch.stack([orthogonalize(matrix) for matrix in stack]))
    values = torch.linalg.svdvals(orthogonalize(stack))
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert not orthogonalize(torch.zeros(2, 3)).any()  # no gradient: no update


def test_matrices_are_those_of_layers() -> None:
    model = tiny_qwen3(num_hidden_layers=2)
    names = {id(weight): name for name, weight in model.named_parameters()}
    chosen = [names[id(matrix)] for matrix in matrices_of(model)]
    assert len(chosen) == 2 * 7
    assert all(".layers." in name and name.endswith("proj.weight") for name in chosen)
    sizes = [matrix.numel() for matrix in matrices_of(model)]
    assert sizes == sorted(sizes, reverse=True)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    assert len(matrices_of(model)) == 2 * 7 - 1
    model = build_family("gpt_oss")
    names = {id(weight): name for name, weight in model.named_parameters()}
    chosen = [names[id(matrix)] for matrix in matrices_of(model)]
    assert not any(name.endswith("bias") for name in chosen)
    assert sum("experts" in name for name in chosen) == 2 * model.config.num_hidden_layers
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))  # its layers are within each other
    names = {id(weight): name for name, weight in model.named_parameters()}
    chosen = sorted(names[id(matrix)].removeprefix("backbone.layers.") for matrix in matrices_of(model))
    projections = ("dt_proj", "in_proj", "out_proj", "x_proj")
    assert chosen == [f"{layer}.mixer.{name}.weight" for layer in range(2) for name in projections]
    assert not is_matrix(torch.zeros(4, 1, 3))  # a convolution's kernel
    assert not is_matrix(torch.zeros(1, 8))
    assert not is_matrix(torch.zeros(8))
