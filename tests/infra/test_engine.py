import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from infra.engines.base import Generation, GenerationRequest, Sampling, generate_all
from infra.engines.sampler import sample_tokens
from infra.engines.stop import StopStrings
from infra.engines.transformers import TransformersEngine
from infra.models.load import load_model
from infra.models.tiny import END, make_tokenizer
from rl_core.rollout.seeding import derive_seed, uniforms
from schemas.config.model import ModelConfig
from schemas.errors import NonFiniteError, WeightsError
from tests.tiny import make_tiny_model

PROMPTS = [[5, 6, 7], [200, 3, 100, 42, 17, 9, 30], [11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(ModelConfig(path=str(folder))))


def request(prompt: Sequence[int], *seeds: int) -> GenerationRequest:
    return GenerationRequest(np.array(prompt), seeds)


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: np.ndarray, temperature: float
) -> torch.Tensor:
    """Log-probs of `response` by one forward over the unpadded sequence."""
    tokens = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0]


def assert_same_tokens(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    assert [g.token_ids.tolist() for g in ours] == [g.token_ids.tolist() for g in theirs]
    assert [g.finish_reason for g in ours] == [g.finish_reason for g in theirs]


def test_greedy_equals_transformers_generate(engine: TransformersEngine, folder: Path) -> None:
    generations = generate_all(engine, [request(prompt, 0) for prompt in PROMPTS], Sampling(24, temperature=0))
    model = load_model(ModelConfig(path=str(folder)))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=24, eos_token_id=None,
        )  # fmt: skip
        assert generation.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        assert generation.finish_reason == "length"


def test_a_row_does_not_depend_on_its_batch(engine: TransformersEngine) -> None:
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
    assert len({tuple(g.token_ids) for g in together}) > 12  # seeds do matter
    assert len({len(g.token_ids) for g in together}) > 4  # and rows did leave at different times


def test_small_cache_budgets_cut_the_requests_into_batches(engine: TransformersEngine, folder: Path) -> None:
    sampling = Sampling(12, stop_token_ids=(7, 70, 170))
    requests = [request(prompt, 1, 2, 3) for prompt in PROMPTS]
    whole = generate_all(engine, requests, sampling)
    cut = TransformersEngine(load_model(ModelConfig(path=str(folder))), max_cache_bytes=1)
    assert [len(batch) for batch in cut._batches(requests, sampling)] == [1, 1, 1]
    assert_same_tokens(whole, generate_all(cut, requests, sampling))


def test_rows_end_with_their_first_stop_token(engine: TransformersEngine) -> None:
    free = generate_all(engine, [request(PROMPTS[0], *range(8))], Sampling(30))
    stops = (int(free[0].token_ids[3]), int(free[1].token_ids[11]))
    stopped = generate_all(engine, [request(PROMPTS[0], *range(8))], Sampling(30, stop_token_ids=stops))
    for before, after in zip(free, stopped, strict=True):
        hits = np.flatnonzero(np.isin(before.token_ids, stops))
        length = hits[0] + 1 if len(hits) else 30
        assert after.token_ids.tolist() == before.token_ids[:length].tolist()
        assert after.finish_reason == ("stop" if len(hits) else "length")
        assert len(after.logprobs) == length


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


def test_samples_are_yielded_when_they_finish(engine: TransformersEngine) -> None:
    sampling = Sampling(60, temperature=1.5, stop_token_ids=tuple(range(0, 256, 16)))
    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    engine.model.register_forward_hook(count)
    numbers = []
    for number, generation in engine.generate([request(prompt, *range(8)) for prompt in PROMPTS], sampling):
        assert forwards == len(generation.token_ids)  # the prefill gives the first token; nothing is run ahead
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
    samples = engine.generate([request(PROMPTS[0], *range(8))], sampling)
    next(samples)
    assert layers[0]() is not None
    del samples
    assert layers[0]() is None
    handle.remove()
    assert len(generate_all(engine, [request(PROMPTS[0], 1)], sampling)) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_logprobs_are_those_of_a_plain_forward(tmp_path: Path, temperature: float, num_key_value_heads: int) -> None:
    folder = make_tiny_model(tmp_path, num_key_value_heads=num_key_value_heads)
    sampling = Sampling(70, temperature, top_p=0.9, top_k=40, stop_token_ids=(5, 50, 150))
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))))
    generations = generate_all(engine, [request(prompt, 1, 2) for prompt in PROMPTS], sampling)
    model = load_model(ModelConfig(path=str(folder)))
    for row, generation in enumerate(generations):
        expected = plain_logprobs(model, PROMPTS[row // 2], generation.token_ids, temperature)
        assert generation.logprobs.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(generation.logprobs), expected, rtol=0, atol=1e-5)


def test_sliding_window_layers_decode_as_transformers_does() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1,
        initializer_range=0.3,
    )  # fmt: skip
    assert config.layer_types == ["full_attention", "sliding_attention"]
    model = Qwen3ForCausalLM(config).eval()
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21]]
    generations = generate_all(
        TransformersEngine(model), [request(p, 1, 2, 3) for p in prompts], Sampling(20, stop_token_ids=(4,))
    )
    for row, generation in enumerate(generations):
        expected = plain_logprobs(model, prompts[row // 3], generation.token_ids, 1.0)
        torch.testing.assert_close(torch.from_numpy(generation.logprobs), expected, rtol=0, atol=1e-5)


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


def test_load_weights_in_place(engine: TransformersEngine, tmp_path: Path) -> None:
    other = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, seed=1))))
    before = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    engine.load_weights(dict(other.named_parameters()), version=3)  # the tied head is not among them
    assert engine.version == 3
    after = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    assert_same_tokens(after, generate_all(TransformersEngine(other), [request(PROMPTS[0], 1)], Sampling(12)))
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model.norm.weight": None}, "missing ['model.norm.weight']"),
        ({"extra": torch.zeros(1)}, "unknown ['extra']"),
        ({"model.norm.weight": torch.zeros(1)}, "of another shape ['model.norm.weight']"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(engine: TransformersEngine, changes: dict, text: str) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in engine.model.named_parameters()} | changes
    with pytest.raises(WeightsError, match="don't fit the model") as caught:
        engine.load_weights({name: tensor for name, tensor in state.items() if tensor is not None}, version=1)
    assert text in str(caught.value)
    assert engine.version == 0
    assert engine.model.model.norm.weight.abs().sum() > 0


def test_weights_that_have_diverged_are_an_error(engine: TransformersEngine) -> None:
    engine.load_weights({n: torch.full_like(t, torch.nan) for n, t in engine.model.named_parameters()}, version=1)
    with pytest.raises(NonFiniteError, match="diverged"):
        generate_all(engine, [request(PROMPTS[0], 1)], Sampling(4))


def test_degenerate_requests(engine: TransformersEngine) -> None:
    assert generate_all(engine, [], Sampling(4)) == []
    assert generate_all(engine, [request(PROMPTS[0])], Sampling(4)) == []
    assert [len(g.token_ids) for g in generate_all(engine, [request([9]), request([9], 1)], Sampling(1))] == [1]
    with pytest.raises(ValueError, match="request 1 has an empty prompt"):
        generate_all(engine, [request([9], 1), request([], 1)], Sampling(4))


PROBS = torch.tensor([0.1, 0.4, 0.3, 0.2])


def drawn(sampling: Sampling, num_draws: int = 1000) -> np.ndarray:
    """How often each of four tokens is drawn at evenly spread uniforms, in thousandths."""
    spread = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    tokens, _ = sample_tokens(PROBS.log().expand(num_draws, 4), spread, sampling)
    return np.bincount(tokens.numpy(), minlength=4)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [100, 400, 300, 200]),
        (Sampling(1, temperature=0), [0, 1000, 0, 0]),
        (Sampling(1, top_k=1), [0, 1000, 0, 0]),
        (Sampling(1, top_k=2), [0, 571, 429, 0]),  # 4/7 and 3/7
        (Sampling(1, top_k=9), [100, 400, 300, 200]),
        (Sampling(1, top_p=0.75), [0, 444, 333, 222]),  # 0.4 + 0.3 falls short: 4/9, 3/9, 2/9
        (Sampling(1, top_p=0.65), [0, 571, 429, 0]),
        (Sampling(1, top_p=1e-9), [0, 1000, 0, 0]),
        (Sampling(1, top_k=3, top_p=0.5), [0, 571, 429, 0]),  # of 4/9, 3/9, 2/9: 4/9 falls short of 1/2
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
def test_draw_by_hand(sampling: Sampling, expected: list[int]) -> None:
    assert np.abs(drawn(sampling) - expected).max() <= 1


@pytest.mark.parametrize("truncation", [{"top_k": 2}, {"top_p": 0.65}, {"min_p": 0.6}])
def test_logprobs_are_those_before_truncation(truncation: dict[str, float]) -> None:
    tokens, logprobs = sample_tokens(
        PROBS.log()[None], torch.tensor([0.9], dtype=torch.float64), Sampling(1, **truncation)
    )
    assert tokens.tolist() == [2]
    torch.testing.assert_close(logprobs, PROBS[2:3].log())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, 3)
    extremes = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for sampling in (Sampling(1), Sampling(1, top_p=0.9), Sampling(1, top_k=2), Sampling(1, min_p=0.1)):
        assert sample_tokens(logits, extremes, sampling)[0].tolist() == [1, 1]


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    values = uniforms(seeds, 50)
    assert np.array_equal(uniforms(seeds[1:2], 7)[0], values[1, :7])
    assert values.shape == (3, 50)
    assert len(np.unique(values)) == 150
    # SplitMix64's published first output for state 0; seeds are mixed into states, and mix(0) is 0.
    assert values[0, 0] == (0xE220A8397B1DCDAF >> 12) / 2**52


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    values = uniforms(np.arange(2000, dtype=np.uint64), 50)
    assert np.all((values >= 0) & (values < 1))
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    centred = values - 0.5
    for neighbour in (centred[1:, :] * centred[:-1, :], centred[:, 1:] * centred[:, :-1]):
        assert abs(neighbour.mean()) < 5 / 12 / np.sqrt(neighbour.size)


def test_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(0, "train", step, group, n) for step in range(5) for group in range(5) for n in range(5)}
    assert len(seeds) == 125
    assert derive_seed(0, "train", 1, 2, 3) == derive_seed(0, "train", 1, 2, 3)
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_the_cache_grows_past_its_room(engine: TransformersEngine) -> None:
    # 64 tokens of room: a response of 150 tokens grows the buffers twice.
    generation = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(150))[0]
    expected = plain_logprobs(engine.model, PROMPTS[0], generation.token_ids, 1.0)
    torch.testing.assert_close(torch.from_numpy(generation.logprobs), expected, rtol=0, atol=1e-5)


def first_stop(token_ids: np.ndarray, stop: Sequence[str]) -> int | None:
    """How many tokens it takes until the whole decoded response holds a stop text."""
    tokenizer = make_tokenizer()
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        if any(part in text for part in stop):
            return count
    return None


def test_rows_end_with_their_first_stop_text(folder: Path) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))), tokenizer=make_tokenizer())
    tokenizer, sampling = make_tokenizer(), Sampling(80, temperature=1.5)
    requests = [request(prompt, *range(8)) for prompt in PROMPTS]
    free = generate_all(engine, requests, sampling)
    texts = [tokenizer.decode(g.token_ids, skip_special_tokens=True) for g in free]
    printable = [[part for part in text.split("\N{REPLACEMENT CHARACTER}") if len(part) >= 2] for text in texts]
    stop = tuple(parts[-1][-3:] for parts in printable[:12] if parts)  # one or several tokens, late in some rows
    assert max(map(len, stop)) > 1
    stopped = generate_all(engine, requests, Sampling(80, temperature=1.5, stop=stop))
    ends = [first_stop(generation.token_ids, stop) for generation in free]
    assert len(set(ends)) > 4
    for before, after, end in zip(free, stopped, ends, strict=True):
        assert after.token_ids.tolist() == before.token_ids[:end].tolist()
        assert after.finish_reason == ("length" if end is None else "stop")
        np.testing.assert_allclose(after.logprobs, before.logprobs[:end], rtol=0, atol=1e-5)


def found_at(responses: Sequence[Sequence[int]], stop: Sequence[str]) -> list[int | None]:
    """How many tokens of each response it takes to complete a stop text, all responses growing side by side."""
    texts = StopStrings(make_tokenizer(), stop, len(responses))
    token_ids = np.zeros((len(responses), max(map(len, responses))), dtype=np.int32)
    for row, response in enumerate(responses):
        token_ids[row, : len(response)] = response
    ends: list[int | None] = [None] * len(responses)
    for count in range(1, token_ids.shape[1] + 1):
        rows = np.array([row for row, end in enumerate(ends) if end is None and count <= len(responses[row])], int)
        for row in rows[texts.find(rows, token_ids, count)] if len(rows) else ():
            ends[row] = count
    return ends


def test_stop_texts_by_hand() -> None:
    encode, end = make_tokenizer().encode, make_tokenizer().convert_tokens_to_ids(END)
    # One token per byte. The emoji is four of them, the accent two.
    assert found_at([encode("a\n\nb"), encode("\nb\n\n"), encode("ab")], ["\n\n"]) == [3, 4, None]
    assert found_at([encode("so 🎉🎉!"), encode("🎉 yes"), encode("né"), encode("ne")], ["🎉", "é"]) == [7, 4, 3, None]
    assert found_at([encode("x" * 50 + "Question: 7")], ["Question:", "nothing"]) == [59]
    assert found_at([[*encode("STO"), end, *encode("P.")]], ["STOP"]) == [5]  # special tokens have no text
    assert found_at([encode("a" + END)], [END]) == [None]
    # The last token completes the stop text and begins a character; a lone byte is no character and holds up nothing.
    assert found_at([encode("STOP") + encode("é")[:1]], ["STOP"]) == [4]
    assert found_at([encode("é")[1:] * 30 + encode("STOP")], ["STOP"]) == [34]


def test_stop_texts_decode_only_a_window() -> None:
    texts = StopStrings(make_tokenizer(), ["Question:"], 1)
    response = np.array([make_tokenizer().encode("é🎉x" * 100)])
    for count in range(1, response.shape[1] + 1):
        assert not texts.find(np.array([0]), response, count).any()
        assert count - texts._starts[0] <= 4 * (2 * len("Question:") + 2)  # characters of at most four bytes


def test_stop_texts_that_the_prompt_holds_end_nothing(folder: Path) -> None:
    engine = TransformersEngine(load_model(ModelConfig(path=str(folder))), tokenizer=make_tokenizer())
    prompt = make_tokenizer().encode("STOP")
    generation = generate_all(engine, [request(prompt, 1)], Sampling(5, stop=("STOP", "TOP", "P")))[0]
    assert first_stop(generation.token_ids, ["P"]) is None
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")


def test_stop_texts_without_a_tokenizer_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate_all(engine, [request(PROMPTS[0], 1)], Sampling(4, stop=("\n",)))
