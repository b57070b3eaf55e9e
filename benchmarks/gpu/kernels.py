"""Kernels against their CPU counterparts: packed attention, the leak probe, and the scoring head.

On the CPU the same comparisons are of bfloat16 with float32, or of the code with itself.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu.results import CheckResult, Figure, Settings
from benchmarks.models import make_model
from rl_core.scoring import Branch, leak_probe, pack_row, use_packed_attention
from rl_core.scoring.attention import packed_attention
from rl_core.scoring.head import HeadOptions, score_targets

BOUNDARIES = (0, 7, 8, 40, 64)  # of the responses of one packed row
PROMPT_TOKENS = 9  # before each of them
BRANCHES = (Branch(2, 10, 13), Branch(2, 20, 25), Branch(3, 8, 3), Branch(3, 16, -1))  # one from another; from a prompt
HEADS, HEAD_SIZE = 4, 32
WINDOW = 5  # tokens


def check(settings: Settings, folder: Path) -> CheckResult:
    """Compare forwards and gradients with those on the CPU; a figure is the largest difference, 1 is the most allowed.

    Raises:
        ScoringError: Packed sequences attend to each other.
    """
    device = torch.device(settings.device)
    figures: dict[str, Figure] = {}
    for kv_heads in (HEADS, HEADS // 2):
        for window in (None, WINDOW):
            name = f"attention, {kv_heads} key heads, {'no window' if window is None else f'window {window}'}"
            for tree, branches in {"": None, ", a shared prompt": (), ", branches": BRANCHES}.items():
                figures[f"{name}{tree}"] = round(attention_difference(device, kv_heads, window, branches), 3)
    figures["scoring head"] = round(head_difference(device), 3)
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("tiny", device, dtype)
        use_packed_attention(model)
        leak_probe(model, share_prompts=True, branches=True)
    missed = [f"{name}: {value} times the allowed difference" for name, value in figures.items() if not value <= 1]
    return CheckResult.of("kernels", figures, missed)


def attention_difference(
    device: torch.device, kv_heads: int, window: int | None, branches: Sequence[Branch] | None
) -> float:
    """Compare packed attention in bfloat16 on a device with float32 on the CPU: output and gradients.

    Args:
        device: The device.
        kv_heads: The number of key and value heads.
        window: The sliding window in tokens; None: none.
        branches: Of the sequences of a row, which share a prompt; None: they don't share it.
    """
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor(BOUNDARIES).diff()
    prompts = torch.full_like(responses, PROMPT_TOKENS)
    ids = [torch.zeros(int(lengths.sum()), dtype=torch.int64) for lengths in (prompts, responses)]
    row = pack_row(ids[0], prompts, ids[1], responses, share_prompts=branches is not None, branches=branches or ())
    shapes = [(1, heads, len(row.input_ids), HEAD_SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    states = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator).transpose(1, 2)
    results = []
    for place, dtype in ((torch.device("cpu"), torch.float32), (device, torch.bfloat16)):
        leaves = [state.to(place, dtype, copy=True).requires_grad_() for state in states]
        own = row.to(place)
        output, _ = packed_attention(
            nn.Module(),
            *leaves,
            None,
            cu_seqlens=own.cu_seqlens,
            max_seqlen=own.max_seqlen,
            shared_keys=own.shared_keys,
            scaling=0.2,
            sliding_window=window,
        )
        (output.float() * weights.to(place)).sum().backward()
        results.append((output, torch.cat([_gradient(leaf).flatten() for leaf in leaves])))
    (output, gradients), (device_output, device_gradients) = results
    return max(_difference(device_output, output, 2e-2, 2e-2), _difference(device_gradients, gradients, 5e-2, 5e-2))


def head_difference(device: torch.device) -> float:
    """Compare the scoring head on a device with the CPU's: bfloat16 operands and float32 sums on both."""
    torch.manual_seed(0)
    head, states, targets = nn.Linear(64, 50), torch.randn(9, 64), torch.arange(9)
    options = HeadOptions(0.7, 1.0, None, 4, top_k=2, has_entropy=True, has_entropy_grad=True)
    results = []
    for place in (torch.device("cpu"), device):
        own = copy.deepcopy(head).to(place, torch.bfloat16)
        leaf = states.detach().to(place, torch.bfloat16, copy=True).requires_grad_()
        logprobs, entropy, top, _ = score_targets(leaf, own, targets.to(place), options)
        (logprobs.sum() + entropy.square().sum() + top.exp().sum()).backward()
        results.append([logprobs, entropy, top, _gradient(leaf), _gradient(own.weight), _gradient(own.bias)])
    return max(_difference(theirs, ours, 1e-2, 1e-4) for ours, theirs in zip(*results, strict=True))


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _difference(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """Return the largest difference as a fraction of `atol + rtol * |expected|`; not a number if one isn't."""
    actual, expected = (tensor.detach().float().cpu() for tensor in (actual, expected))
    return float(((actual - expected).abs() / (atol + rtol * expected.abs())).max())
