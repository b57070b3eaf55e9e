"""Packed scoring equals a plain forward of each sequence alone, in values and in gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from rl_core.scoring import (
    PACKED_ATTENTION,
    leak_probe,
    pack_row,
    packed_logprobs,
    packed_scores,
    padded_scores,
    register,
    use_packed_attention,
    use_padded_attention,
)
from rl_core.scoring import attention as attention_module
from schemas.errors import ScoringError
from tests.packed import VOCAB_SIZE, Batch, plain_logprobs, random_batch, tiny_qwen3

PROMPTS, RESPONSES = [3, 1, 5, 2, 1], [4, 7, 0, 1, 3]


def packed(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, chunk_tokens: int = 4) -> Tensor:
    use_packed_attention(model)
    return packed_logprobs(model, batch.row, temperature=temperature, chunk_tokens=chunk_tokens)


def padded(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0) -> Tensor:
    use_padded_attention(model)
    return padded_scores(model, batch.row, temperature=temperature, chunk_tokens=4).logprobs


def plain(model: PreTrainedModel, batch: Batch, *, temperature: float = 1.0, attention: str = "sdpa") -> Tensor:
    model.set_attn_implementation(attention)
    return torch.cat([plain_logprobs(model, *sequence, temperature) for sequence in batch.sequences])


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The norm of the difference over the norm, of all parameters' gradients together."""
    assert len(ours) == len(theirs)
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in theirs)) ** 0.5


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
    ours = packed(model, batch, temperature=temperature)
    our_gradients = gradients(model, (ours * ours).sum())
    theirs = plain(model, batch, temperature=temperature)
    their_gradients = gradients(model, (theirs * theirs).sum())
    from_padded = padded(model, batch, temperature=temperature)
    padded_gradients = gradients(model, (from_padded * from_padded).sum())

    assert ours.dtype == from_padded.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(from_padded, theirs, rtol=0, atol=1e-5)
    assert relative_error(our_gradients, their_gradients) < 1e-5
    assert relative_error(padded_gradients, their_gradients) < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 4, 4, 9])), min_size=1, max_size=9),
    seed=st.integers(0, 99),
)
def test_packed_equals_padded_for_any_lengths(lengths: list[tuple[int, int]], seed: int) -> None:
    # Few distinct lengths, so that neighbors are often of equal length: those share one attention call.
    model, batch = tiny_qwen3(), random_batch(*(list(part) for part in zip(*lengths, strict=True)), seed=seed)
    ours = packed(model, batch)
    our_gradients = gradients(model, (ours * ours).sum())
    from_padded = padded(model, batch)
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
    expected = plain(model, batch)
    torch.testing.assert_close(packed(model, batch), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded(model, batch), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("score", [packed, padded])
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
    chunked = packed(model, batch, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(chunked, packed(model, batch, chunk_tokens=4), rtol=0, atol=1e-6)


def test_no_logits_are_kept_for_the_backward() -> None:
    model = tiny_qwen3(vocab_size=997)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        packed(model, random_batch([2], [50]), chunk_tokens=64)
    # 50 * 997 logits would be the largest but for the weights, which have 997 * 32 values.
    assert max(kept) <= 997 * 32


def test_no_grad_gives_no_graph() -> None:
    model, batch = tiny_qwen3(), random_batch(PROMPTS, RESPONSES)
    with torch.no_grad():
        logprobs = packed(model, batch)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, packed(model, batch).detach(), rtol=0, atol=1e-6)


def test_gradient_checkpointing_of_the_model() -> None:
    model, batch = tiny_qwen3(), random_batch(PROMPTS, RESPONSES)
    expected = gradients(model, packed(model, batch).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    forwards: list[int] = []  # of the first layer's attention: the second one is the recomputation
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: forwards.append(1))
    assert relative_error(gradients(model, packed(model, batch).sum()), expected) < 1e-6
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
    ours, theirs = packed(model, batch), plain(model, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert (packed(model, batch) - ours).abs().max() > 1e-3  # the window is what made them equal


def test_softcapped_attention_is_rejected() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    with pytest.raises(ScoringError, match="needs softcap"):
        packed(Gemma2ForCausalLM(config).eval(), random_batch([2], [3]))


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
    torch.testing.assert_close(packed(model, batch), plain(model, batch, attention="eager"), rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("score", [packed, padded])
def test_a_sequence_longer_than_the_positions_is_rejected(score: Callable[..., Tensor]) -> None:
    model = tiny_qwen3(max_position_embeddings=8)
    score(model, random_batch([3, 5], [5, 3]))
    with pytest.raises(ScoringError, match=r"sequence 1 of the packed row has 9 tokens, but .* only 8 positions"):
        score(model, random_batch([3, 5], [5, 4]))


def test_padded_scores_reject_a_model_with_packed_attention() -> None:
    model = tiny_qwen3()
    use_packed_attention(model)
    with pytest.raises(ScoringError, match="ignores padding; call"):
        padded_scores(model, random_batch([1], [1]).row, temperature=1.0, chunk_tokens=4)


def test_packed_scores_reject_a_model_with_another_attention() -> None:
    row = random_batch([1], [1]).row
    with pytest.raises(ScoringError, match=r"uses attention 'sdpa'.*call rl_core\.scoring\.use_packed_attention"):
        packed_logprobs(tiny_qwen3(), row, temperature=1.0, chunk_tokens=4)


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


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_leak_probe_passes_on_packed_attention(dtype: torch.dtype, autocast: bool) -> None:
    model = tiny_qwen3(dtype=dtype)
    use_packed_attention(model)
    before = torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        leak_probe(model)
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.fixture
def restored_attention() -> Iterator[None]:
    yield
    register()


def _register_leaking(is_causal: bool) -> None:
    """Register, under our name, an attention that ignores the boundaries."""

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
        attention_module, "_causal_sdpa", lambda q, k, v, scaling, window: sdpa(q, k, v, scaling * 2, window)
    )
    with pytest.raises(ScoringError, match="differs from the model's own forward"):
        leak_probe(model)
    assert model.config._attn_implementation == PACKED_ATTENTION


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_varlen_flash_equals_the_cpu_path(num_key_value_heads: int, sliding_window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    boundaries = torch.tensor([0, 7, 8, 40, 64], dtype=torch.int32)
    states = [
        torch.randn(1, heads, 64, 32, generator=generator).bfloat16()
        for heads in (4, num_key_value_heads, num_key_value_heads)
    ]
    weights = torch.randn(1, 64, 4, 32, generator=generator)
    outputs, gradient_norms = [], []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        leaves = [state.to(device, dtype).requires_grad_() for state in states]
        output, _ = attention_module.packed_attention(
            nn.Module(),
            *leaves,
            None,
            cu_seqlens=boundaries.to(device),
            max_seqlen=32,
            scaling=0.2,
            sliding_window=sliding_window,
        )
        (output.float() * weights.to(device)).sum().backward()
        outputs.append(output.detach().float().cpu())
        gradient_norms.append(torch.cat([leaf.grad.float().cpu().flatten() for leaf in leaves]))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient_norms[1], gradient_norms[0], rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leak_probe_on_cuda(dtype: torch.dtype) -> None:
    model = tiny_qwen3(dtype=dtype).to("cuda")
    use_packed_attention(model)
    leak_probe(model)
