"""Stop strings: the token that completes one ends the response."""

from collections.abc import Sequence

import numpy as np
import pytest

from infra.engines.base import Sampling, generate_all
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.embedded.samples import StopStrings
from infra.models.load import load_model
from infra.models.tiny import END, make_tokenizer
from schemas.config.model import ModelConfig
from tests.support.engine_checks import assert_requests_have_stops_of_their_own, request
from tests.support.tiny import make_tiny_model

PROMPTS = [[5, 6, 7], [200, 3, 100, 42, 17, 9, 30], [11]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path_factory.mktemp("model")))))
    return TransformersEngine(model, tokenizer=make_tokenizer())


def first_stop(token_ids: np.ndarray, stop: Sequence[str]) -> int | None:
    """Return the number of tokens after which the whole decoded response contains a stop string, or None."""
    tokenizer = make_tokenizer()
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=True)
        if any(part in text for part in stop):
            return count
    return None


def test_responses_end_with_their_first_stop_string(engine: TransformersEngine) -> None:
    tokenizer, sampling = make_tokenizer(), Sampling(80, temperature=1.5)
    requests = [request(prompt, *range(8)) for prompt in PROMPTS]
    unstopped = generate_all(engine, requests, sampling)
    texts = [tokenizer.decode(g.token_ids, skip_special_tokens=True) for g in unstopped]
    printable = [[part for part in text.split("\N{REPLACEMENT CHARACTER}") if len(part) >= 2] for text in texts]
    stop = tuple(parts[-1][-3:] for parts in printable[:12] if parts)  # one or several tokens, late in some rows
    assert max(map(len, stop)) > 1
    stopped = generate_all(engine, requests, Sampling(80, temperature=1.5, stop=stop))
    ends = [first_stop(generation.token_ids, stop) for generation in unstopped]
    assert len(set(ends)) > 4
    for before, after, end in zip(unstopped, stopped, ends, strict=True):
        assert after.token_ids.tolist() == before.token_ids[:end].tolist()
        assert after.finish_reason == ("length" if end is None else "stop")
        np.testing.assert_allclose(after.logprobs, before.logprobs[:end], rtol=0, atol=1e-5)


def found_at(responses: Sequence[Sequence[int]], stop: Sequence[str]) -> list[int | None]:
    """Return how many tokens each response takes to complete a stop string, while all responses grow in parallel."""
    strings = StopStrings(make_tokenizer())
    for row in range(len(responses)):
        strings.restart(row, stop)
    token_ids = np.zeros((len(responses), max(map(len, responses))), dtype=np.int32)
    for row, response in enumerate(responses):
        token_ids[row, : len(response)] = response
    ends: list[int | None] = [None] * len(responses)
    for count in range(1, token_ids.shape[1] + 1):
        rows = np.array([row for row, end in enumerate(ends) if end is None and count <= len(responses[row])], int)
        for row in rows[strings.find(rows, token_ids, np.full(len(rows), count))] if len(rows) else ():
            ends[row] = count
    return ends


def test_stop_strings_by_hand() -> None:
    encode, end = make_tokenizer().encode, make_tokenizer().convert_tokens_to_ids(END)
    # One token per byte. The emoji is four of them, the accent two.
    assert found_at([encode("a\n\nb"), encode("\nb\n\n"), encode("ab")], ["\n\n"]) == [3, 4, None]
    assert found_at([encode("so 🎉🎉!"), encode("🎉 yes"), encode("né"), encode("ne")], ["🎉", "é"]) == [7, 4, 3, None]
    assert found_at([encode("x" * 50 + "Question: 7")], ["Question:", "nothing"]) == [59]
    assert found_at([[*encode("STO"), end, *encode("P.")]], ["STOP"]) == [5]  # special tokens decode to nothing
    assert found_at([encode("a" + END)], [END]) == [None]
    # The last token completes the stop string and begins a character; lone bytes are no character and delay nothing.
    assert found_at([encode("STOP") + encode("é")[:1]], ["STOP"]) == [4]
    assert found_at([encode("é")[1:] * 30 + encode("STOP")], ["STOP"]) == [34]


def test_only_a_window_is_decoded() -> None:
    strings = StopStrings(make_tokenizer())
    strings.restart(0, ["Question:"])
    response = np.array([make_tokenizer().encode("é🎉x" * 100)])
    for count in range(1, response.shape[1] + 1):
        assert not strings.find(np.array([0]), response, np.array([count])).any()
        assert count - strings._starts[0] <= 4 * (2 * len("Question:") + 2)  # characters of at most four bytes


def test_requests_have_stop_strings_of_their_own(engine: TransformersEngine) -> None:
    assert_requests_have_stops_of_their_own(engine)


def test_a_stop_string_in_the_prompt_ends_nothing(engine: TransformersEngine) -> None:
    prompt = make_tokenizer().encode("STOP")
    generation = generate_all(engine, [request(prompt, 1)], Sampling(5, stop=("STOP", "TOP", "P")))[0]
    assert first_stop(generation.token_ids, ["P"]) is None
    assert (len(generation.token_ids), generation.finish_reason) == (5, "length")


def test_stop_strings_without_a_tokenizer_are_rejected(engine: TransformersEngine) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate_all(TransformersEngine(engine.model), [request(PROMPTS[0], 1)], Sampling(4, stop=("\n",)))
