"""Sampling tokens from logits, computed by hand."""

import numpy as np
import pytest
import torch

from infra.engines.base import Sampling
from infra.engines.embedded.samples import sample_tokens

PROBS = torch.tensor([0.1, 0.4, 0.3, 0.2])


def frequencies(sampling: Sampling, num_samples: int = 1000) -> np.ndarray:
    """Return how often each of four tokens is sampled at evenly spaced uniforms, in thousandths."""
    uniforms = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    tokens, _, _ = sample_tokens(PROBS.log().expand(num_samples, 4), uniforms, sampling)
    return np.bincount(tokens.numpy(), minlength=4)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [100, 400, 300, 200]),
        (Sampling(1, temperature=0), [0, 1000, 0, 0]),
        (Sampling(1, top_k=1), [0, 1000, 0, 0]),
        (Sampling(1, top_k=2), [0, 571, 429, 0]),  # 4/7 and 3/7
        (Sampling(1, top_k=9), [100, 400, 300, 200]),
        (Sampling(1, top_p=0.75), [0, 444, 333, 222]),  # 0.4 + 0.3 is too little: 4/9, 3/9, 2/9
        (Sampling(1, top_p=0.65), [0, 571, 429, 0]),
        (Sampling(1, top_p=1e-9), [0, 1000, 0, 0]),
        (Sampling(1, top_k=3, top_p=0.5), [0, 571, 429, 0]),  # of 4/9, 3/9, 2/9: 4/9 is less than 1/2
        (Sampling(1, temperature=0.5), [33, 533, 300, 133]),  # squares: 1, 16, 9, 4 of 30
        (Sampling(1, min_p=0.3), [0, 444, 333, 222]),  # at least 0.3 of 0.4: 0.12
        (Sampling(1, min_p=0.2), [100, 400, 300, 200]),
        (Sampling(1, min_p=0.99), [0, 1000, 0, 0]),
        (Sampling(1, temperature=0.5, min_p=0.5), [0, 640, 360, 0]),  # 16 and 9: 4 is less than half of 16
        (Sampling(1, temperature=2, min_p=0.8), [0, 536, 464, 0]),  # roots: 0.63, 0.55, 0.45 less than 0.8 of 0.63
        (Sampling(1, min_p=0.6, top_k=3), [0, 571, 429, 0]),  # 0.2 is less than 0.24
        (Sampling(1, min_p=0.3, top_p=0.75), [0, 571, 429, 0]),  # of 4/9, 3/9, 2/9: 7/9 is enough; 0.7 wasn't
    ],
)
def test_sampling_by_hand(sampling: Sampling, expected: list[int]) -> None:
    assert np.abs(frequencies(sampling) - expected).max() <= 1


@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.65}, {"min_p": 0.6}])
def test_logprobs_are_those_before_truncation(truncation: dict[str, float]) -> None:
    uniforms = torch.tensor([0.9], dtype=torch.float64)
    tokens, logprobs, mask = sample_tokens(PROBS.log()[None], uniforms, Sampling(1, **truncation))
    assert mask is None
    assert tokens.tolist() == [2]
    torch.testing.assert_close(logprobs, PROBS[2:3].log())


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"min_p": 0.6}, [1, 2]),
        ({"min_p": 0.3, "top_p": 0.75}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3]),
    ],
)
def test_a_mask_is_of_what_truncation_leaves(truncation: dict[str, float], kept: list[int]) -> None:
    uniforms = torch.tensor([0.0, 0.9], dtype=torch.float64)
    logits = torch.stack([PROBS, PROBS.flip(0)]).log()
    tokens, logprobs, mask = sample_tokens(logits, uniforms, Sampling(1, keeps_mask=True, **truncation))
    assert mask is not None
    assert [each.tolist() for each in mask] == [kept, sorted(3 - token for token in kept)]
    expected = logits.gather(-1, tokens[:, None])[:, 0] - PROBS[kept].sum().log()
    torch.testing.assert_close(logprobs, expected)


def test_impossible_tokens_are_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, 3)
    extremes = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for sampling in (Sampling(1), Sampling(1, top_p=0.9), Sampling(1, top_k=2), Sampling(1, min_p=0.1)):
        assert sample_tokens(logits, extremes, sampling)[0].tolist() == [1, 1]
