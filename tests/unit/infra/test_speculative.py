"""Speculative decoding in the embedded engine: the same samples in fewer forwards."""

import doctest
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

import infra.engines.embedded.decoding as decoding
from infra.engines.base import Generation, GenerationRequest, Sampling, generate_all
from infra.engines.embedded import rows as engine_rows
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.embedded.rows import draft, stack_drafts
from infra.models.load import load_model
from infra.models.tiny import make_tokenizer
from rl_core.rollout.seeding import derive_seed
from schemas.config.model import ModelConfig
from schemas.config.rollout import NgramSpeculation
from schemas.errors import ModelError
from tests.support.engine_checks import (
    assert_degenerate_requests_work,
    assert_identical,
    assert_logprobs,
    assert_requests_have_limits_of_their_own,
    assert_same_tokens,
    assert_stop_tokens_end_responses,
    assert_turns_are_exact,
    plain_logprobs,
    request,
)
from tests.support.tiny import make_tiny_model

PROMPTS = [[5, 6, 7], [200, 3, 100, 42, 17, 9, 30], [11]]
LOW = 0.1  # a temperature at which the tiny model repeats itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def plain(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(ModelConfig(path=str(folder))))


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(ModelConfig(path=str(folder))), speculative=NgramSpeculation(max_rows=64))


def sample(engine: TransformersEngine, sampling: Sampling, num_samples: int = 6) -> list[Generation]:
    requests = [
        request(prompt, *(derive_seed("row", row, n) for n in range(num_samples))) for row, prompt in enumerate(PROMPTS)
    ]
    return generate_all(engine, requests, sampling)


def num_tokens(generations: Sequence[Generation]) -> int:
    return sum(len(generation.token_ids) for generation in generations)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(80, temperature=0),
        Sampling(80, temperature=LOW),
        Sampling(80, temperature=LOW, top_k=20, top_p=0.9, min_p=0.01),
        Sampling(80, temperature=LOW, stop_token_ids=tuple(range(0, 256, 16))),
    ],
    ids=["greedy", "sampled", "truncated", "stopped"],
)
def test_samples_are_those_without_drafts(
    engine: TransformersEngine, plain: TransformersEngine, sampling: Sampling
) -> None:
    without, found = sample(plain, sampling), sample(engine, sampling)
    assert_same_tokens(found, without)
    for generation, expected in zip(found, without, strict=True):
        assert_logprobs(generation, expected.logprobs, 1e-4)  # a low temperature magnifies rounding
    assert engine.usage.accepted > 0
    assert engine.usage.drafted > engine.usage.accepted
    assert engine.usage.num_steps < plain.usage.num_steps
    assert plain.usage.drafted == 0
    assert "engine/draft_acceptance" in engine.usage.metrics
    assert "engine/draft_acceptance" not in plain.usage.metrics
    assert_identical(sample(engine, sampling), found)


def test_a_stop_string_within_accepted_drafts_ends_a_response(folder: Path) -> None:
    tokenizer, model = make_tokenizer(), ModelConfig(path=str(folder))
    unstopped = sample(TransformersEngine(load_model(model)), Sampling(80, temperature=LOW))
    text = tokenizer.decode(unstopped[0].token_ids.tolist(), skip_special_tokens=True)
    sampling = Sampling(80, temperature=LOW, stop=(text[40:43],))
    engine = TransformersEngine(load_model(model), tokenizer=tokenizer, speculative=NgramSpeculation(max_rows=64))
    found = sample(engine, sampling)
    assert_same_tokens(found, sample(TransformersEngine(load_model(model), tokenizer=tokenizer), sampling))
    assert {generation.finish_reason for generation in found} >= {"stop"}
    assert engine.usage.accepted > 0


def test_logprobs_are_those_of_a_plain_forward(engine: TransformersEngine) -> None:
    found = sample(engine, Sampling(40, temperature=LOW), num_samples=2)
    for number, generation in enumerate(found):
        assert_logprobs(generation, plain_logprobs(engine.model, PROMPTS[number // 2], generation.token_ids, LOW), 1e-4)


def test_gaps_of_dropped_drafts_are_closed(
    engine: TransformersEngine, plain: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_GROWTH_TOKENS", 2)
    closed = list[int]()
    select = decoding.PreallocatedLayer.select_columns
    monkeypatch.setattr(
        decoding.PreallocatedLayer,
        "select_columns",
        lambda layer, columns: (closed.append(columns.shape[1]), select(layer, columns))[1],
    )
    sampling = Sampling(80, temperature=LOW)
    assert_same_tokens(sample(engine, sampling), sample(plain, sampling))
    assert len(closed) > 4
    assert max(closed) < 80 + max(map(len, PROMPTS))


def test_more_rows_than_the_limit_are_decoded_without_drafts(folder: Path, plain: TransformersEngine) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))), speculative=NgramSpeculation(max_rows=3))
    requests = [
        GenerationRequest(np.array(prompt), (1, 2, 3), limit)
        for prompt, limit in zip(PROMPTS, (10, 20, 60), strict=True)
    ]
    widths = []
    engine.model.register_forward_hook(lambda *arguments: widths.append(tuple(arguments[-1].logits.shape[:2])))
    found, without = (generate_all(each, requests, Sampling(60, temperature=LOW)) for each in (engine, plain))
    assert_same_tokens(found, without)
    assert widths[:20] == [(3, 1)] + [(9, 1)] * 9 + [(6, 1)] * 10
    assert widths[20][0] == 3
    assert widths[20][1] > 1
    assert len(widths) < 60


def test_other_requests_work_as_without_drafts(engine: TransformersEngine) -> None:
    assert_stop_tokens_end_responses(engine, PROMPTS[0])
    assert_requests_have_limits_of_their_own(engine, engine.model)
    assert_degenerate_requests_work(engine, PROMPTS[0])


@pytest.mark.parametrize("joins", [False, True])
def test_rows_of_several_turns_are_exact(engine: TransformersEngine, joins: bool) -> None:
    assert_turns_are_exact(engine, engine.model, joins=joins)
    assert engine.usage.drafted > 0


def test_a_model_that_cannot_forget_tokens_is_refused() -> None:
    config = Qwen3Config(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="a qwen3 model has layers with a sliding window or a state"):
        TransformersEngine(Qwen3ForCausalLM(config).eval(), speculative=NgramSpeculation())


def test_the_docstring_examples_of_drafts_run() -> None:
    assert doctest.testmod(engine_rows).failed == 0


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20).map(np.array)


@given(own=tokens, others=st.lists(tokens, max_size=3), ngram=st.integers(1, 4), limit=st.integers(0, 5))
def test_a_draft_follows_the_longest_earlier_occurrence(
    own: np.ndarray, others: list[np.ndarray], ngram: int, limit: int
) -> None:
    found = draft(own, others, ngram, limit).tolist()
    texts = [part.tolist() for part in (*others, own)]
    for size in range(min(ngram, len(own)), 0, -1):
        tail = own[-size:].tolist()
        following = [
            text[at + size : at + size + limit]
            for text in texts
            for at in range(len(text) - size)
            if text[at : at + size] == tail
        ]
        if following:
            assert found == following[-1]
            return
    assert found == []


def test_drafts_of_unequal_lengths_are_filled_up() -> None:
    assert stack_drafts([np.array([2, 3, 1]), np.array([6])]).tolist() == [[2, 3, 1], [6, -1, -1]]
