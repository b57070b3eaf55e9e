"""The embedded transformers engine."""

import doctest
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import infra.engines.base
from infra.engines.base import GenerationRequest, Sampling, generate, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.models.load import experts_dtype, load_model
from rl_core.rollout.seeding import derive_seed
from rl_core.scoring import RouterReplay
from schemas.config.model import ModelConfig
from schemas.errors import NonFiniteError, WeightsError
from tests.support.engine_checks import PROMPTS as TURN_PROMPTS
from tests.support.engine_checks import (
    UNFIT_WEIGHTS,
    assert_branches_are_exact,
    assert_degenerate_requests_work,
    assert_logprobs,
    assert_requests_have_limits_of_their_own,
    assert_same_tokens,
    assert_stop_tokens_end_responses,
    assert_turns_are_exact,
    greedy,
    plain_logprobs,
    play_turns,
    request,
)
from tests.support.tiny import make_tiny_model, make_tiny_moe
from tests.support.weight_tensors import load_state

PROMPTS = [[5, 6, 7], [200, 3, 100, 42, 17, 9, 30], [11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(ModelConfig(path=str(folder))))


def test_the_docstring_examples_run() -> None:
    assert doctest.testmod(infra.engines.base).failed == 0


def test_greedy_equals_transformers_generate(engine: TransformersEngine, folder: Path) -> None:
    generations = generate_all(engine, [request(prompt, 0) for prompt in PROMPTS], Sampling(24, temperature=0))
    model = load_model(ModelConfig(path=str(folder)))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids.tolist() == greedy(model, prompt, 24)
        assert generation.finish_reason == "length"


def test_a_sample_does_not_depend_on_its_batch(engine: TransformersEngine) -> None:
    sampling = Sampling(40, temperature=1.2, stop_token_ids=tuple(range(0, 256, 16)))
    requests = [request(prompt, *(derive_seed("row", row, n) for n in range(6))) for row, prompt in enumerate(PROMPTS)]
    together = generate_all(engine, requests, sampling)
    alone = [
        generation
        for one in requests
        for seed in one.seeds
        for generation in generate_all(engine, [GenerationRequest(one.prompt_ids, (seed,))], sampling)
    ]
    assert_same_tokens(together, alone)
    assert len({tuple(g.token_ids) for g in together}) > 12  # the seeds matter
    assert len({len(g.token_ids) for g in together}) > 4  # and rows left the batch at different times


def test_a_small_cache_budget_splits_the_requests_into_batches(engine: TransformersEngine, folder: Path) -> None:
    sampling = Sampling(12, stop_token_ids=(7, 70, 170))
    requests = [request(prompt, 1, 2, 3) for prompt in PROMPTS]
    whole = generate_all(engine, requests, sampling)
    split = TransformersEngine(load_model(ModelConfig(path=str(folder))), max_cache_bytes=1)
    assert_same_tokens(whole, generate_all(split, requests, sampling))
    lengths = [[len(generation.token_ids) for generation in whole[at : at + 3]] for at in (0, 3, 6)]
    assert split.usage.running == sum(map(sum, lengths))  # a decoding step adds a token to each row
    assert split.usage.num_steps == sum(map(max, lengths))
    assert split.usage.waiting == 6 * max(lengths[0]) + 3 * max(lengths[1])


def test_responses_end_with_their_first_stop_token(engine: TransformersEngine) -> None:
    assert_stop_tokens_end_responses(engine, PROMPTS[0])


def test_requests_have_limits_of_their_own(engine: TransformersEngine) -> None:
    assert_requests_have_limits_of_their_own(engine, engine.model)


def test_finished_rows_leave_the_batch(engine: TransformersEngine) -> None:
    sampling = Sampling(60, temperature=1.5, stop_token_ids=tuple(range(0, 256, 16)))
    widths = []
    engine.model.register_forward_hook(lambda *arguments: widths.append(arguments[-1].logits.shape[0]))
    generations = generate_all(engine, [request(prompt, *range(8)) for prompt in PROMPTS], sampling)
    lengths = [len(g.token_ids) for g in generations]
    assert widths[0] == 3  # every prompt is prefilled once
    assert widths[1:] == sorted(widths[1:], reverse=True)
    assert len(widths) == max(lengths)  # the last token of the last row is not run
    assert sum(widths[1:]) < 1.15 * (sum(lengths) - len(lengths))  # at most 1/8 of a batch is finished rows


def test_samples_are_yielded_as_soon_as_they_finish(engine: TransformersEngine) -> None:
    sampling = Sampling(60, temperature=1.5, stop_token_ids=tuple(range(0, 256, 16)))
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    engine.model.register_forward_hook(count)
    numbers = []
    for number, generation in generate(engine, [request(prompt, *range(8)) for prompt in PROMPTS], sampling):
        assert forwards == len(generation.token_ids)  # the prefill gives the first token; nothing runs ahead
        assert not torch.is_inference_mode_enabled()
        numbers.append(number)
    assert sorted(numbers) == list(range(24))
    assert numbers != sorted(numbers)


def test_a_consumer_that_stops_early_frees_the_cache(engine: TransformersEngine) -> None:
    layers = []

    def keep(*arguments: object) -> None:
        layers.append(weakref.ref(arguments[-1].past_key_values.layers[0]))  # type: ignore[attr-defined]

    handle = engine.model.register_forward_hook(keep)
    sampling = Sampling(60, stop_token_ids=tuple(range(128)))
    samples = generate(engine, [request(PROMPTS[0], *range(8))], sampling)
    next(samples)
    assert layers[0]() is not None
    del samples
    assert layers[0]() is None
    handle.remove()
    assert len(generate_all(engine, [request(PROMPTS[0], 1)], sampling)) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_logprobs_equal_those_of_a_plain_forward(tmp_path: Path, temperature: float, num_key_value_heads: int) -> None:
    folder = make_tiny_model(tmp_path, num_key_value_heads=num_key_value_heads)
    sampling = Sampling(70, temperature, top_p=0.9, top_k=40, stop_token_ids=(5, 50, 150))
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))))
    generations = generate_all(engine, [request(prompt, 1, 2) for prompt in PROMPTS], sampling)
    model = load_model(ModelConfig(path=str(folder)))
    for row, generation in enumerate(generations):
        assert_logprobs(generation, plain_logprobs(model, PROMPTS[row // 2], generation.token_ids, temperature))


def test_sliding_window_layers_decode_as_in_transformers() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        initializer_range=0.3,
    )  # fmt: skip
    assert config.layer_types == ["full_attention", "sliding_attention"]
    model = Qwen3ForCausalLM(config).eval()
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21]]
    engine = TransformersEngine(model)
    generations = generate_all(engine, [request(p, 1, 2, 3) for p in prompts], Sampling(20, stop_token_ids=(4,)))
    for row, generation in enumerate(generations):
        assert_logprobs(generation, plain_logprobs(model, prompts[row // 3], generation.token_ids, 1.0))
    for joins in (False, True):  # rows of such layers can't be moved
        assert_turns_are_exact(engine, model, joins=joins)
        assert_branches_are_exact(engine, model, joins=joins)


@pytest.mark.parametrize("joins", [False, True])
def test_a_row_goes_on_without_computing_its_history_again(engine: TransformersEngine, joins: bool) -> None:
    num_between = assert_turns_are_exact(engine, engine.model, joins=joins)
    assert engine.usage.prefilled == 2 * (sum(map(len, TURN_PROMPTS)) + num_between)  # it has played twice


@pytest.mark.parametrize("joins", [False, True])
def test_rows_without_room_for_their_history_compute_it_again(folder: Path, joins: bool) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))))
    engine.max_cache_bytes = 130 * engine._token_bytes  # about one row and a half
    num_between = assert_turns_are_exact(engine, engine.model, joins=joins)
    assert engine.usage.prefilled > 2 * (sum(map(len, TURN_PROMPTS)) + num_between)
    assert engine.usage.peak_cache > 0


@pytest.mark.parametrize("joins", [False, True])
def test_a_branch_computes_only_what_no_earlier_turn_has(engine: TransformersEngine, joins: bool) -> None:
    num_new = assert_branches_are_exact(engine, engine.model, joins=joins)
    num_rows = 2 * len(TURN_PROMPTS)  # each asks its prompt again, whose last token gives the first logits
    assert engine.usage.prefilled == 2 * (sum(map(len, TURN_PROMPTS)) + num_new + num_rows)  # it has played twice


def test_a_branch_without_room_for_earlier_turns_computes_them_again(folder: Path) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))))
    engine.max_cache_bytes = 150 * engine._token_bytes  # about one row and a half
    num_new = assert_branches_are_exact(engine, engine.model, joins=True)
    assert engine.usage.prefilled > 3 * (sum(map(len, TURN_PROMPTS)) + num_new)
    assert engine.usage.peak_cache <= 1


def test_a_row_that_has_left_goes_on_in_another_call_order(engine: TransformersEngine) -> None:
    joined, waves = (play_turns(engine, Sampling(12), joins=joins) for joins in (True, False))
    assert [row[0].tolist() for row in joined] == [row[0].tolist() for row in waves]


def test_samples_follow_the_probabilities(engine: TransformersEngine) -> None:
    generations = generate_all(engine, [request(PROMPTS[1], *range(20_000))], Sampling(1, temperature=1.3))
    counts = np.bincount([g.token_ids[0] for g in generations], minlength=engine.model.config.vocab_size)
    with torch.no_grad():
        probs = (engine.model(torch.tensor([PROMPTS[1]])).logits[0, -1] / 1.3).softmax(-1).double().numpy()
    deviations = (counts - 20_000 * probs) / np.sqrt(20_000 * probs * (1 - probs))
    likely = probs > 1e-3
    assert likely.sum() > 20
    assert np.abs(deviations[likely]).max() < 4.5  # a normal's 4.5 sigma: once in 150,000
    assert 0.6 < (deviations[likely] ** 2).mean() < 1.6


def test_weights_are_loaded_in_place(engine: TransformersEngine, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1))))
    before = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    load_state(engine, dict(other.named_parameters()), version=3)  # the tied head is not among them
    assert engine.version == 3
    after = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    assert_same_tokens(after, generate_all(TransformersEngine(other), [request(PROMPTS[0], 1)], Sampling(12)))
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()


@UNFIT_WEIGHTS
def test_weights_that_do_not_fit_change_nothing(engine: TransformersEngine, changes: dict, text: str) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in engine.model.named_parameters()} | changes
    with pytest.raises(WeightsError, match="don't fit the model") as caught:
        load_state(engine, {name: tensor for name, tensor in state.items() if tensor is not None}, version=1)
    assert text in str(caught.value)
    assert engine.version == 0
    assert engine.model.model.norm.weight.abs().sum() > 0


def test_diverged_weights_raise(engine: TransformersEngine) -> None:
    load_state(engine, {n: torch.full_like(t, torch.nan) for n, t in engine.model.named_parameters()}, version=1)
    with pytest.raises(NonFiniteError, match="diverged"):
        generate_all(engine, [request(PROMPTS[0], 1)], Sampling(4))


def test_degenerate_requests(engine: TransformersEngine) -> None:
    assert_degenerate_requests_work(engine, PROMPTS[0])


def test_the_cache_grows_past_its_preallocated_space(engine: TransformersEngine) -> None:
    # 64 tokens are preallocated: a response of 150 tokens grows the buffers twice.
    generation = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(150))[0]
    assert_logprobs(generation, plain_logprobs(engine.model, PROMPTS[0], generation.token_ids, 1.0))


def test_recorded_experts_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    config = ModelConfig(path=str(make_tiny_moe(tmp_path, num_experts=300)))
    engine = TransformersEngine(load_model(config), records_experts=True)
    requests = [request(prompt, 1, 2, 3) for prompt in PROMPTS]
    generations = generate_all(engine, requests, Sampling(12, stop_token_ids=tuple(range(0, 260, 9))))
    assert len({len(generation.token_ids) for generation in generations}) > 1
    assert experts_dtype(config) == "uint16[4]"
    model = load_model(config)
    replay = RouterReplay(model)
    for number, generation in enumerate(generations):
        prompt, recorded = PROMPTS[number // 3], generation.experts
        with replay.recording() as chosen, torch.no_grad():
            model(torch.tensor([[*prompt, *generation.token_ids.tolist()]]), use_cache=False)
        assert recorded.prompt.dtype == recorded.response.dtype == np.uint16
        assert np.array_equal(recorded.prompt, chosen[0][: len(prompt)])
        assert np.array_equal(recorded.response[:-1], chosen[0][len(prompt) : -1])  # the last one has not been run
        assert len(recorded.response) == len(generation.token_ids)
