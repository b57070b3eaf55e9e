"""Packed scoring equals a plain forward of each sequence alone, in values and in gradients."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rl_core.scoring import pack_row
from tests.support.packed import VOCAB_SIZE, random_batch, tiny_qwen3
from tests.unit.rl_core.gradients import gradients, relative_error
from tests.unit.rl_core.scorers import score_packed, score_padded, score_plain

PROMPTS, RESPONSES = [3, 1, 5, 2, 1], [4, 7, 0, 1, 3]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "overrides",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
    ],
    ids=["one-to-one", "grouped", "multi-query-tied"],
)
def test_packed_equals_plain(overrides: dict[str, object], temperature: float) -> None:
    model, batch = tiny_qwen3(**overrides), random_batch(PROMPTS, RESPONSES)
    ours = score_packed(model, batch, temperature=temperature)
    our_gradients = gradients(model, (ours * ours).sum())
    theirs = score_plain(model, batch, temperature=temperature)
    their_gradients = gradients(model, (theirs * theirs).sum())
    from_padded = score_padded(model, batch, temperature=temperature)
    padded_gradients = gradients(model, (from_padded * from_padded).sum())

    assert ours.dtype == from_padded.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(from_padded, theirs, rtol=0, atol=1e-5)
    assert relative_error(our_gradients, their_gradients) < 1e-5
    assert relative_error(padded_gradients, their_gradients) < 1e-5


@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 4, 4, 9])), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_packed_equals_padded_for_any_lengths(lengths: list[tuple[int, int]], seed: int) -> None:
    # Few distinct lengths, so that neighbors are often of equal length: those share one attention call.
    model, batch = tiny_qwen3(), random_batch(*(list(part) for part in zip(*lengths, strict=True)), seed=seed)
    ours = score_packed(model, batch)
    our_gradients = gradients(model, (ours * ours).sum())
    from_padded = score_padded(model, batch)
    padded_gradients = gradients(model, (from_padded * from_padded).sum())
    torch.testing.assert_close(ours, from_padded, rtol=0, atol=2e-5)
    if len(ours):
        assert relative_error(our_gradients, padded_gradients) < 2e-5


@pytest.mark.parametrize(
    ("prompts", "responses"),
    [([4], [6]), ([1], [1]), ([1, 1, 1], [0, 1, 0]), ([1, 1], [1, 1])],
    ids=["one-sequence", "shortest", "one-token-sequences", "two-token-sequences"],
)
def test_edge_shapes(prompts: list[int], responses: list[int]) -> None:
    model, batch = tiny_qwen3(), random_batch(prompts, responses)
    expected = score_plain(model, batch)
    torch.testing.assert_close(score_packed(model, batch), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(score_padded(model, batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("score", [score_packed, score_padded])
@pytest.mark.parametrize("prompts", [[3, 1], []], ids=["empty-responses", "dummy"])
def test_nothing_to_score_still_has_a_graph(prompts: list[int], score: Callable[..., Tensor]) -> None:
    model = tiny_qwen3()
    logprobs = score(model, random_batch(prompts, [0] * len(prompts)))
    assert logprobs.shape == (0,)
    grads = gradients(model, logprobs.sum())
    assert len(grads) == len(list(model.parameters()))
    assert all(bool((grad == 0).all()) for grad in grads)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_chunking_changes_nothing(chunk_tokens: int) -> None:
    model, batch = tiny_qwen3(), random_batch(PROMPTS, RESPONSES)
    chunked = score_packed(model, batch, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(chunked, score_packed(model, batch, chunk_tokens=4), rtol=0, atol=1e-6)


def test_no_logits_are_kept_for_the_backward() -> None:
    model = tiny_qwen3(vocab_size=997)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        score_packed(model, random_batch([2], [50]), chunk_tokens=64)
    # 50 * 997 logits would be the largest but for the weights, which have 997 * 32 values.
    assert max(kept) <= 997 * 32


def test_no_grad_gives_no_graph() -> None:
    model, batch = tiny_qwen3(), random_batch(PROMPTS, RESPONSES)
    with torch.no_grad():
        logprobs = score_packed(model, batch)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, score_packed(model, batch).detach(), rtol=0, atol=1e-6)


def test_gradient_checkpointing_of_the_model() -> None:
    model, batch = tiny_qwen3(), random_batch(PROMPTS, RESPONSES)
    expected = gradients(model, score_packed(model, batch).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    forwards: list[int] = []  # of the first layer's attention: the second one is the recomputation
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: forwards.append(1))
    assert relative_error(gradients(model, score_packed(model, batch).sum()), expected) < 1e-6
    assert len(forwards) == 2


def test_sliding_window_shorter_than_a_sequence() -> None:
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    batch = random_batch([2, 9, 3], [1, 8, 6])
    ours, theirs = score_packed(model, batch), score_plain(model, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert (score_packed(model, batch) - ours).abs().max() > 1e-3  # the window is what made them equal


def test_softcapped_logits() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=0.5,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model, batch = Gemma2ForCausalLM(config).eval(), random_batch(PROMPTS, RESPONSES)
    torch.testing.assert_close(
        score_packed(model, batch), score_plain(model, batch, attention="eager"), rtol=0, atol=1e-5
    )


def test_packed_row_by_hand() -> None:
    # Two sequences: prompt 10 11, response 12; prompt 20, response 21 22.
    row = pack_row(torch.tensor([10, 11, 20]), torch.tensor([2, 1]), torch.tensor([12, 21, 22]), np.array([1, 2]))
    assert row.input_ids.tolist() == [10, 11, 12, 20, 21, 22]
    assert row.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert row.cu_seqlens.tolist() == [0, 3, 6]
    assert row.cu_seqlens.dtype == torch.int32
    assert row.predict_index.tolist() == [1, 3, 4]
    assert row.targets.tolist() == [12, 21, 22]
    assert row.response_lengths.tolist() == [1, 2]
    assert row.max_seqlen == 3
    assert row.to("cpu").input_ids.tolist() == row.input_ids.tolist()
