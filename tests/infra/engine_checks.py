"""Shared by the tests of both rollout engines: requests, reference computations and comparisons."""

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, generate_all

NEEDS_VLLM = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'sluice-rl[cpu]'"
    ),
]
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


def assert_requests_have_limits_of_their_own(engine: RolloutEngine, model: PreTrainedModel) -> None:
    """Assert that a response that is continued, beside others, has the log-probs of one forward over all of it."""
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


def assert_degenerate_requests_work(engine: RolloutEngine, prompt: Sequence[int]) -> None:
    """Assert what requests without samples give, and that an empty prompt is rejected."""
    assert generate_all(engine, [], Sampling(4)) == []
    assert generate_all(engine, [request(prompt)], Sampling(4)) == []
    assert [len(g.token_ids) for g in generate_all(engine, [request([9]), request([9], 1)], Sampling(1))] == [1]
    with pytest.raises(ValueError, match="request 1 has an empty prompt"):
        generate_all(engine, [request([9], 1), request([], 1)], Sampling(4))
