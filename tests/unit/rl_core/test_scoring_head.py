"""The scoring head: entropy, most likely tokens, precision and memory, and its gradients; and all of it under FSDP."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from rl_core.scoring import (
    PackedRow,
    TokenScores,
    packed_scores,
    padded_scores,
    use_packed_attention,
    use_padded_attention,
)
from rl_core.scoring.head import HeadOptions, score_targets
from rl_core.scoring.logprobs import EntropyMode
from tests.support.packed import VOCAB_SIZE, plain_log_softmax, random_batch, tiny_qwen3

BATCH = random_batch([3, 1, 5, 2, 1], [4, 7, 0, 1, 3])
TEMPERATURE, TOP_K = 0.7, 3


def score(model: PreTrainedModel, *, entropy: EntropyMode = False, top_k: int = 0) -> TokenScores:
    use_packed_attention(model)
    return packed_scores(model, BATCH.row, temperature=TEMPERATURE, chunk_tokens=4, entropy=entropy, top_k=top_k)


def plain(model: PreTrainedModel) -> Tensor:
    """Compute the log-probs of all tokens, [R, vocabulary], by forwards of each sequence alone."""
    use_padded_attention(model)
    return torch.cat([plain_log_softmax(model, *sequence, TEMPERATURE) for sequence in BATCH.sequences])


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


def test_entropy_and_top_tokens_equal_a_plain_forward() -> None:
    model = tiny_qwen3()
    scores = score(model, entropy="grad", top_k=TOP_K)
    assert scores.entropy is not None
    assert scores.top_logprobs is not None
    assert scores.top_ids is not None
    ours = gradient(model, (scores.entropy.square() + scores.logprobs * 0.3).sum() + scores.top_logprobs.exp().sum())

    logprobs = plain(model)
    entropy = torch.distributions.Categorical(logits=logprobs, validate_args=False).entropy()
    top, top_ids = logprobs.topk(TOP_K)
    chosen = logprobs.gather(-1, BATCH.response_ids[:, None]).squeeze(-1)
    theirs = gradient(model, (entropy.square() + chosen * 0.3).sum() + top.exp().sum())

    torch.testing.assert_close(scores.logprobs, chosen, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.top_logprobs, top, rtol=0, atol=1e-5)
    assert torch.equal(scores.top_ids, top_ids)
    assert relative_error(ours, theirs) < 1e-5


def random_mask() -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers and ids of tokens, none at some positions and targets left out at others, and bool [R, V]."""
    generator = torch.Generator().manual_seed(11)
    allowed = torch.rand(len(BATCH.response_ids), VOCAB_SIZE, generator=generator) < 0.1
    allowed[::4] = False
    rows, ids = allowed.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(allowed))
    allowed[counts == 0] = True
    return counts, ids, allowed.scatter(1, BATCH.response_ids[:, None], True)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_masked_scores_equal_a_plain_forward(chunk_tokens: int) -> None:
    counts, ids, allowed = random_mask()
    model = tiny_qwen3()
    use_packed_attention(model)
    row = replace(BATCH.row, mask_counts=counts, mask_ids=ids)
    scores = packed_scores(model, row, temperature=TEMPERATURE, chunk_tokens=chunk_tokens, entropy="grad")
    assert scores.entropy is not None
    ours = gradient(model, (scores.entropy.square() + scores.logprobs * 0.3).sum())

    logprobs = plain(model).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    chosen = logprobs.gather(-1, BATCH.response_ids[:, None]).squeeze(-1)
    finite = logprobs.masked_fill(~allowed, 0.0)
    entropy = -(finite.exp() * finite * allowed).sum(-1)
    theirs = gradient(model, (entropy.square() + chosen * 0.3).sum())

    torch.testing.assert_close(scores.logprobs, chosen, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=1e-5)
    assert relative_error(ours, theirs) < 1e-5
    use_padded_attention(model)
    padded = padded_scores(model, row, temperature=TEMPERATURE, chunk_tokens=9)
    torch.testing.assert_close(padded.logprobs, chosen, rtol=0, atol=1e-5)


def test_padded_scores_equal_packed_scores() -> None:
    model = tiny_qwen3()
    ours = score(model, entropy="no_grad", top_k=TOP_K)
    use_padded_attention(model)
    padded = padded_scores(model, BATCH.row, temperature=TEMPERATURE, chunk_tokens=9, entropy="no_grad", top_k=TOP_K)
    for name, value in ours._asdict().items():
        torch.testing.assert_close(value, getattr(padded, name), rtol=0, atol=1e-5)


def test_entropy_by_hand() -> None:
    # Two tokens at odds of 3 to 1 (logits ln 3 and 0): H = ln 4 - 3/4 ln 3. At temperature 2 the odds are sqrt(3).
    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[3.0], [1.0]]).log()
    states, targets = torch.ones(1, 1), torch.tensor([1])
    for temperature, odds in ((1.0, 3.0), (2.0, 3.0**0.5)):
        options = HeadOptions(temperature, 1.0, None, 8, top_k=2, has_entropy=True, has_entropy_grad=False)
        logprobs, entropy, top, top_ids = score_targets(states, head, targets, options)
        p = torch.tensor([odds, 1.0]) / (odds + 1)
        torch.testing.assert_close(logprobs, p[1:].log())
        torch.testing.assert_close(entropy, -(p * p.log()).sum()[None])
        torch.testing.assert_close(top[0], p.log())
        assert top_ids.tolist() == [[0, 1]]


def test_reported_entropy_adds_nothing_to_the_backward() -> None:
    model = tiny_qwen3()
    expected = gradient(model, score(model).logprobs.sum())
    scores = score(model, entropy="no_grad")
    assert scores.entropy is not None
    assert not scores.entropy.requires_grad
    assert torch.equal(gradient(model, scores.logprobs.sum()), expected)


def test_scores_that_are_not_requested_are_none() -> None:
    assert score(tiny_qwen3())[1:] == (None, None, None)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_equal_finite_differences(has_bias: bool, softcap: float | None) -> None:
    torch.manual_seed(0)
    head = nn.Linear(3, 7, bias=has_bias, dtype=torch.float64)
    states = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 2, 2, 5])
    options = HeadOptions(0.8, 1.0, softcap, chunk_tokens=2, top_k=2, has_entropy=True, has_entropy_grad=True)

    def scores(states: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return score_targets(states, head, targets, options)[:3]

    assert torch.autograd.gradcheck(scores, (states, *head.parameters()))


def test_gradients_of_given_tokens_equal_finite_differences() -> None:
    torch.manual_seed(0)
    head, states = nn.Linear(3, 7, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    targets, given = torch.tensor([0, 6, 2]), torch.tensor([[5, 0], [6, 1], [3, 4]])
    options = HeadOptions(0.8, 1.0, 2.0, chunk_tokens=2, top_k=0, has_entropy=False, has_entropy_grad=False)

    def scores(states: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        logprobs, _, top, ids = score_targets(states, head, targets, options, given)
        assert torch.equal(ids, given)
        return logprobs, top

    assert torch.autograd.gradcheck(scores, (states, *head.parameters()))
    logits = 2 * torch.tanh(head(states) / 2) / 0.8
    torch.testing.assert_close(scores(states)[1], logits.log_softmax(-1).gather(-1, given))


def test_the_most_likely_tokens_are_among_the_first_ones() -> None:
    head = nn.Linear(1, 4, bias=False)
    head.weight.data = torch.tensor([[1.0], [3.0], [2.0], [4.0]])
    options = HeadOptions(1.0, 1.0, None, 8, top_k=2, has_entropy=False, has_entropy_grad=False, num_tokens=3)
    _, _, top, ids = score_targets(torch.ones(1, 1), head, torch.tensor([0]), options)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(top[0], torch.tensor([1.0, 3.0, 2.0, 4.0]).log_softmax(-1)[[1, 2]])


def test_a_frozen_head_gets_no_gradient() -> None:
    head, states = nn.Linear(3, 7).requires_grad_(False), torch.randn(2, 3, requires_grad=True)
    options = HeadOptions(1.0, 1.0, None, 8, top_k=0, has_entropy=False, has_entropy_grad=False)
    score_targets(states, head, torch.tensor([1, 2]), options)[0].sum().backward()
    assert head.weight.grad is None
    assert states.grad is not None


@pytest.mark.parametrize("entropy", [False, "no_grad", "grad"])
def test_no_logits_are_saved_for_the_backward(entropy: EntropyMode) -> None:
    model, row = tiny_qwen3(vocab_size=997), random_batch([2], [50]).row
    use_packed_attention(model)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        packed_scores(model, row, temperature=1.0, chunk_tokens=64, entropy=entropy, top_k=5)
    # 50 * 997 logits would be the largest but for the weights, which have 997 * 32 values.
    assert max(kept) <= 997 * 32


@pytest.mark.parametrize("entropy", ["no_grad", "grad"])
def test_the_logits_of_the_last_chunk_are_not_computed_again(entropy: EntropyMode) -> None:
    """Of five positions in chunks of two, three have their logits computed again; in a second backward, all have."""
    head, states = nn.Linear(3, 7, bias=False), torch.randn(5, 3, requires_grad=True)
    options = HeadOptions(1.0, 1.0, None, 2, top_k=0, has_entropy=True, has_entropy_grad=entropy == "grad")
    gradients, products = [], []
    with FlopCounterMode(display=False) as counter:
        logprobs, of_each, _, _ = score_targets(states, head, torch.arange(5), options)
        total = logprobs.sum() + (of_each.sum() if entropy == "grad" else 0)
        for _ in range(3):
            products.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm] / (2 * 3 * 7))
            gradients.append(torch.autograd.grad(total, [states, head.weight], retain_graph=True))
    # Of the logits, and of the states' gradients; the weight's, which is added in place, isn't counted.
    assert products == [5, 5 + 3 + 5, 5 + 3 + 5 + 5 + 5]
    assert all(map(torch.equal, gradients[0], gradients[1]))


def test_scores_of_a_bfloat16_model_are_float32() -> None:
    """The tolerances allow for bfloat16 activations (8 bits: 2^-8 relative) in two layers, not for rounded logits."""
    model = tiny_qwen3()
    exact = score(model, entropy="grad", top_k=TOP_K)
    assert exact.entropy is not None
    expected = gradient(model, (exact.logprobs + exact.entropy).sum())
    model = tiny_qwen3(dtype=torch.bfloat16)
    scores = score(model, entropy="grad", top_k=TOP_K)
    use_padded_attention(model)
    padded = padded_scores(model, BATCH.row, temperature=TEMPERATURE, chunk_tokens=4)
    assert scores.entropy is not None
    assert scores.top_logprobs is not None
    assert scores.logprobs.dtype == scores.entropy.dtype == scores.top_logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, exact.logprobs, rtol=0, atol=0.08)
    assert (scores.logprobs - exact.logprobs).abs().mean() < 0.03
    torch.testing.assert_close(scores.entropy, exact.entropy, rtol=0, atol=0.08)
    torch.testing.assert_close(scores.logprobs, padded.logprobs, rtol=0, atol=0.08)
    assert relative_error(gradient(model, (scores.logprobs + scores.entropy).sum()), expected) < 0.05


def test_the_head_rounds_operands_and_not_logits() -> None:
    """From the same rounded operands, bfloat16 scores equal float64's to float32's precision."""
    torch.manual_seed(0)
    head, states, targets = nn.Linear(64, 50, bias=False), torch.randn(9, 64), torch.arange(9)
    head.weight.data *= 40  # logits of dozens: rounded to bfloat16 they would be off by 0.1
    options = HeadOptions(1.0, 1.0, None, 4, top_k=0, has_entropy=True, has_entropy_grad=False)
    head, states = head.bfloat16(), states.bfloat16()
    logprobs, entropy, _, _ = score_targets(states, head, targets, options)
    exact = states.bfloat16().double() @ head.weight.bfloat16().double().t()
    expected = exact.log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected.gather(-1, targets[:, None])[:, 0], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=2e-5)


class Scorer(nn.Module):
    """A module like the one that a sharded trainer wraps: its forward scores."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: PackedRow) -> TokenScores:
        return packed_scores(self.model, row, temperature=TEMPERATURE, chunk_tokens=4, entropy="no_grad")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_sharded_parameters(tied: bool, checkpointing: bool) -> None:
    model = tiny_qwen3(tie_word_embeddings=tied)
    expected_scores = score(model)
    expected = gradient(model, expected_scores.logprobs.square().sum())
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    scorer = fully_shard(Scorer(model), mesh=mesh)

    scores = scorer(BATCH.row)
    torch.testing.assert_close(scores.logprobs, expected_scores.logprobs)
    scores.logprobs.square().sum().backward()
    dummy = scorer(random_batch([], []).row)  # adds a zero gradient
    dummy.logprobs.sum().backward()
    shards = [parameter.grad for parameter in scorer.parameters()]
    assert all(isinstance(shard, DTensor) for shard in shards)
    assert relative_error(torch.cat([shard.full_tensor().flatten() for shard in shards]), expected) < 1e-6
