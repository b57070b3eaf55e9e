"""Inputs and models that packed scoring rejects, and the leak probe."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from rl_core.scoring import (
    PACKED_ATTENTION,
    leak_probe,
    pack_row,
    packed_scores,
    padded_scores,
    register,
    use_packed_attention,
)
from rl_core.scoring import attention as attention_module
from rl_core.scoring.attention import PackedMask, describe_mask
from rl_core.scoring.miniature import build_miniature
from schemas.errors import ScoringError
from tests.support.packed import random_batch, tiny_qwen3
from tests.unit.rl_core.scorers import score_packed, score_padded


@pytest.mark.parametrize("name", ["position_bias", "block_indices", "an_option_of_a_later_version"])
def test_an_option_that_packed_attention_does_not_know_is_rejected_by_name(name: str) -> None:
    states, bounds = torch.zeros(1, 1, 2, 8), torch.tensor([0, 2])
    attend = partial(attention_module.packed_attention, torch.nn.Module(), states, states, states, None)
    attend(cu_seqlens=bounds, position_ids=bounds, use_cache=False, output_attentions=None)
    with pytest.raises(ScoringError, match=f"Module needs {name}, which packed attention doesn't support"):
        attend(cu_seqlens=bounds, **{name: states})


def test_a_mask_of_another_kind_is_rejected() -> None:
    config = tiny_qwen3(sliding_window=4).config
    assert describe_mask(config=config, q_length=9) == PackedMask(None)
    assert describe_mask(config=config, local_size=config.sliding_window).sliding_window == config.sliding_window
    with pytest.raises(ScoringError, match="not only causal or a sliding window: local_size = 5"):
        describe_mask(config=config, local_size=5)  # of a chunk
    with pytest.raises(ScoringError, match="mask_function"):
        describe_mask(config=config, use_vmap=True)
    with pytest.raises(ScoringError, match="allow_is_bidirectional_skip"):
        describe_mask(config=config, allow_is_bidirectional_skip=True)
    with pytest.raises(ScoringError, match="attention_mask"):
        describe_mask(config=config, attention_mask=torch.tensor([[True, False]]))


def test_an_empty_prompt_is_rejected() -> None:
    with pytest.raises(ScoringError, match="sequence 1 of the packed row has no prompt token"):
        pack_row(torch.tensor([1, 2]), np.array([2, 0]), torch.tensor([3]), np.array([0, 1]))


def test_inconsistent_lengths_are_rejected() -> None:
    ids = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"response_ids has shape \(2,\), but response_lengths add up to 3"):
        pack_row(ids, np.array([2]), ids, np.array([3]))
    with pytest.raises(ValueError, match="1-D of one length"):
        pack_row(ids, np.array([2]), ids, np.array([1, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"temperature": float("nan")}, "temperature nan must be positive"),
        ({"chunk_tokens": 0}, "chunk_tokens 0 at least 1"),
        ({"top_k": -1}, "top_k -1 must be from 0 to the vocabulary's 61"),
        ({"top_k": 62}, "top_k 62 must be from 0 to the vocabulary's 61"),
        ({"entropy": "yes"}, "entropy 'yes' must be"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    model, row = tiny_qwen3(), random_batch([1], [1]).row
    arguments = {"temperature": 1.0, "chunk_tokens": 4} | options
    with pytest.raises(ValueError, match=message):
        padded_scores(model, row, **arguments)
    use_packed_attention(model)
    with pytest.raises(ValueError, match=message):
        packed_scores(model, row, **arguments)


@pytest.mark.parametrize("score", [score_packed, score_padded])
def test_a_sequence_longer_than_the_positions_is_rejected(score: Callable[..., Tensor]) -> None:
    model = tiny_qwen3(max_position_embeddings=8)
    score(model, random_batch([3, 5], [5, 3]))
    with pytest.raises(ScoringError, match=r"sequence 1 of the packed row has 9 tokens, but .* only 8 positions"):
        score(model, random_batch([3, 5], [5, 4]))


def test_padded_scores_reject_a_model_with_packed_attention() -> None:
    model = tiny_qwen3()
    use_packed_attention(model)
    with pytest.raises(ScoringError, match="ignores padding"):
        padded_scores(model, random_batch([1], [1]).row, temperature=1.0, chunk_tokens=4)


def test_packed_scores_reject_a_model_with_another_attention() -> None:
    row = random_batch([1], [1]).row
    with pytest.raises(ScoringError, match=r"uses attention 'sdpa' of its own, .*, not 'sluice_packed'"):
        packed_scores(tiny_qwen3(), row, temperature=1.0, chunk_tokens=4)


def test_packed_attention_rejects_unsupported_calls() -> None:
    model = tiny_qwen3(attention_dropout=0.5)
    use_packed_attention(model)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ScoringError, match="no cu_seqlens"):
        model(ids)
    boundaries = {"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32), "max_seqlen": 3, "use_cache": False}
    with pytest.raises(ScoringError, match="2 rows"):
        model(ids.expand(2, 3), **boundaries)
    with pytest.raises(ScoringError, match=r"attention dropout 0\.5"):
        model.train()(ids, **boundaries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_leak_probe_passes_on_packed_attention(dtype: torch.dtype) -> None:
    model = tiny_qwen3(dtype=dtype)
    use_packed_attention(model)
    before = torch.random.get_rng_state()
    leak_probe(model)
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("name", "num_seeds"), [("Mixtral", 8), ("DeepseekV3", 8), ("Qwen3_5MoeText", 1)])
def test_experts_that_change_by_rounding_are_no_fault(name: str, num_seeds: int) -> None:
    for seed in range(num_seeds):
        model = build_miniature(getattr(transformers, f"{name}Config")(), 1, seed).bfloat16()
        use_packed_attention(model)
        leak_probe(model)


@pytest.fixture
def restored_attention() -> Iterator[None]:
    yield
    register()


def _register_leaking(is_causal: bool) -> None:
    """Register an attention that ignores the boundaries under the name of packed attention."""

    def leaking(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: object
    ) -> tuple[Tensor, None]:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
        return output.transpose(1, 2), None

    AttentionInterface.register(PACKED_ATTENTION, leaking)


@pytest.mark.usefixtures("restored_attention")
@pytest.mark.parametrize("is_causal", [True, False])
def test_leak_probe_fails_when_attention_ignores_boundaries(is_causal: bool) -> None:
    model = tiny_qwen3(initializer_range=0.02)  # as small as freshly made models are
    use_packed_attention(model)
    _register_leaking(is_causal)
    with pytest.raises(ScoringError, match="packed sequences attend to each other: changing sequence 0"):
        leak_probe(model)


def test_leak_probe_fails_when_packed_differs_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3()
    use_packed_attention(model)
    sdpa = attention_module._causal_sdpa
    monkeypatch.setattr(
        attention_module, "_causal_sdpa", lambda q, k, v, scaling, **window: sdpa(q, k, v, scaling * 2, **window)
    )
    with pytest.raises(ScoringError, match=r"packed scoring .* differs from its own forward"):
        leak_probe(model)
    assert model.config._attn_implementation == PACKED_ATTENTION
