"""A prompt that samples share: plans count it once in a micro-batch, and log-probs and gradients are as without."""

import sys
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from infra.models.load import enable_gradient_checkpointing
from infra.models.lora import add_adapter
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.planning import plan_forward, plan_step
from rl_core.planning.balance import QUADRATIC_COST, row_costs
from rl_core.scoring import check_structure, leak_probe, pack_row, packed_scores, use_packed_attention
from rl_core.scoring.miniature import build_miniature
from rl_core.training import RankRows
from rl_core.training.rows import packed_row
from schemas.config.model import LoraConfig
from schemas.errors import PlanError, ScoringError
from schemas.plan import RankPlan
from tests.support.packed import tiny_qwen3
from tests.unit.rl_core.gradients import gradients, relative_error

TOLERANCE = 1e-6
Group = tuple[int, list[int]]  # tokens of the prompt, and of the response of each sample

GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 12), min_size=1, max_size=6)), min_size=1, max_size=8
).filter(lambda groups: any(sum(responses) for _, responses in groups))
SEEDS, RANKS, BUDGETS = st.integers(0, 9), st.integers(1, 5), st.integers(24, 90)


def sizes(groups: list[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return prompt lengths, response lengths and group of each row."""
    rows = [(prompt, response, at) for at, (prompt, responses) in enumerate(groups) for response in responses]
    prompts, responses, numbers = np.array(rows).T
    return prompts, responses, numbers


def tokens_and_cost(groups: list[Group], rows: tuple[int, ...]) -> tuple[int, float]:
    """Count a micro-batch's tokens and cost: each prompt once; a response attends to its prompt and itself."""
    prompts, responses, numbers = sizes(groups)
    first = {int(numbers[row]): int(prompts[row]) for row in rows}
    tokens = sum(first.values()) + sum(int(responses[row]) for row in rows)
    pairs = sum(prompt**2 for prompt in first.values())
    pairs += sum(int((prompts[row] + responses[row]) ** 2 - prompts[row] ** 2) for row in rows)
    return tokens, tokens + pairs * QUADRATIC_COST


def check(plan: RankPlan, groups: list[Group], num_ranks: int, budget: int) -> None:
    assert len(plan.ranks) == num_ranks
    for rank, cost in zip(plan.ranks, plan.rank_costs, strict=True):
        counted = [tokens_and_cost(groups, micro.rows) for micro in rank]
        assert [micro.num_tokens for micro in rank] == [tokens for tokens, _ in counted]
        assert max(tokens for tokens, _ in counted) <= budget
        assert [cost for _, cost in counted] == sorted((cost for _, cost in counted), reverse=True)
        assert sum(cost for _, cost in counted) == cost
        assert all(list(micro.rows) == sorted(micro.rows) for micro in rank)


@given(GROUPS, st.integers(1, 4), RANKS, BUDGETS, SEEDS)
def test_plans_of_groups(groups: list[Group], num_updates: int, num_ranks: int, budget: int, seed: int) -> None:
    prompts, responses, numbers = sizes(groups)
    options = {"num_updates": num_updates, "num_ranks": num_ranks, "token_budget": budget, "seed": seed}
    shared = numbers, prompts
    plan = plan_step(prompts, responses, responses, groups=numbers, prefixes=shared, **options)
    assert sorted(row for update in plan.updates for row in update.rows) == np.flatnonzero(responses).tolist()
    apart = plan_step(prompts, responses, responses, groups=numbers, **options)
    for update, other in zip(plan.updates, apart.updates, strict=True):
        check(update, groups, num_ranks, budget)
        assert set(update.rows) == set(other.rows)  # what is trained on together doesn't depend on sharing
        assert update.num_tokens <= other.num_tokens
    forward = plan_forward(prompts, responses, num_ranks=num_ranks, token_budget=budget, prefixes=shared)
    assert sorted(forward.rows) == list(range(len(prompts)))
    check(forward, groups, num_ranks, budget)


@example(
    [(1, [1, 8, 1, 1, 1]), (6, [1, 1, 8, 1, 1, 1]), (8, [12]), (3, [9, 1, 1, 4, 1]), (3, [1] * 4)], 4, 3, 24, 1, True
)
@given(GROUPS, st.integers(1, 4), RANKS, BUDGETS, SEEDS, st.booleans())
def test_rows_of_distinct_prompts_are_planned_as_without_groups(
    groups: list[Group], num_updates: int, num_ranks: int, budget: int, seed: int, share: bool
) -> None:
    prompts, responses, _ = sizes(groups)
    distinct = np.random.default_rng(seed).permutation(len(prompts))
    options = {"num_updates": num_updates, "num_ranks": num_ranks, "token_budget": budget, "seed": seed}
    shared = {"prefixes": (distinct, prompts) if share else None}
    rows = prompts, responses, responses
    assert plan_step(*rows, **options, groups=distinct, **shared) == plan_step(*rows, **options)
    forward = {"num_ranks": num_ranks, "token_budget": budget}
    assert plan_forward(prompts, responses, **forward, **shared) == plan_forward(prompts, responses, **forward)


def planned(num_groups: int, samples: int, num_ranks: int, budget: int = 100_000) -> list[list[tuple[int, ...]]]:
    """Plan groups with prompts of 512 tokens and responses of 128; return the rows of each micro-batch with some."""
    prompts, numbers = np.full(num_groups * samples, 512), np.repeat(np.arange(num_groups), samples)
    options = {"num_ranks": num_ranks, "token_budget": budget, "prefixes": (numbers, prompts)}
    plan = plan_forward(prompts, np.full_like(prompts, 128), **options)
    return [[micro.rows for micro in rank if micro.rows] for rank in plan.ranks]


def test_a_group_stays_whole_unless_budget_or_balance_ask_for_more() -> None:
    assert planned(2, 4, num_ranks=2) == [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]
    assert planned(1, 4, num_ranks=1, budget=512 + 4 * 128) == [[(0, 1, 2, 3)]]
    assert sorted(map(len, planned(1, 4, num_ranks=1, budget=512 + 4 * 128 - 1)[0])) == [1, 3]
    # Halves cost 768 tokens, and a whole group 1024, which the other rank would wait for.
    assert planned(1, 4, num_ranks=2) == [[(0, 1)], [(2, 3)]]
    # Nine groups on eight ranks: each has nine samples, at most of two groups.
    ranks = planned(9, 8, num_ranks=8)
    assert [len(rows) for (rows,) in ranks] == [9] * 8
    assert all(len({row // 8 for row in rows}) == 2 for (rows,) in ranks)
    # With as many ranks as samples, each has one, and computes its prompt.
    assert [len(rank) for rank in planned(3, 2, num_ranks=6)] == [1] * 6


def test_a_large_group_is_dealt_by_runs_of_rows() -> None:
    num_rows, num_ranks, calls = 4_000, 32, 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    responses = np.random.default_rng(0).integers(1, 500, num_rows)
    groups, prompts = np.zeros(num_rows, np.int64), np.full(num_rows, 300)
    sys.setprofile(count)
    try:
        plan = plan_forward(prompts, responses, num_ranks=num_ranks, token_budget=10**9, prefixes=(groups, prompts))
    finally:
        sys.setprofile(None)
    assert sorted(plan.rows) == list(range(num_rows))
    rows_of_rank = [plan.rank_rows(rank) for rank in range(num_ranks)]
    costs = [tokens_and_cost([(300, responses.tolist())], tuple(rows))[1] for rows in rows_of_rank]
    assert costs == list(plan.rank_costs)
    lowest = row_costs(np.array([300]))[0] + (row_costs(300 + responses) - row_costs(prompts)).sum() / num_ranks
    assert max(costs) < 1.02 * lowest
    assert calls < 10 * num_rows  # with each row in each rank and attempt: 621,000


def test_updates_have_whole_groups() -> None:
    numbers, lengths = np.repeat(np.arange(6), 4), np.full(24, 3)
    plan = plan_step(lengths, lengths, lengths, groups=numbers, num_updates=3, num_ranks=1, token_budget=99, seed=1)
    assert [sorted(np.bincount(numbers[list(update.rows)], minlength=6)) for update in plan.updates] == [
        [0, 0, 0, 0, 4, 4]
    ] * 3


def test_prompts_of_unequal_lengths_share_by_length() -> None:
    prompts = [5, 5, 7]
    plan = plan_forward(prompts, [1, 1, 1], num_ranks=1, token_budget=99, prefixes=([0, 0, 0], prompts))
    assert plan.num_tokens == 5 + 7 + 3


def test_numbers_of_another_count_are_rejected() -> None:
    rows = [1] * 3, [1] * 3
    with pytest.raises(PlanError, match="2 numbers and 3 lengths of what 3 rows begin with"):
        plan_forward(*rows, num_ranks=1, token_budget=9, prefixes=([0, 0], [1] * 3))
    with pytest.raises(PlanError, match="2 group numbers for 3 rows"):
        plan_step(*rows, [1] * 3, num_updates=1, num_ranks=1, token_budget=9, seed=0, groups=[0, 0])


def windowed() -> PreTrainedModel:
    return tiny_qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=0)


def adapted() -> PreTrainedModel:
    model = tiny_qwen3()
    add_adapter(model, LoraConfig(rank=3, alpha=6))
    for name, weight in model.named_parameters():
        if "lora_B" in name:  # they are 0 at first
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return model


def checkpointed() -> PreTrainedModel:
    model = tiny_qwen3()
    enable_gradient_checkpointing(model)
    return model


def of_family(name: str) -> PreTrainedModel:
    return build_miniature(getattr(transformers, f"{name}Config")(), longest=10**9).requires_grad_(True)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "plain": tiny_qwen3,
    "window": windowed,
    "lora": adapted,
    "checkpointed": checkpointed,
    "softcap": lambda: of_family("Gemma2"),
    "sinks, experts": lambda: of_family("GptOss"),
}
IN_FLOAT32 = "sinks, experts"  # whose products of experts torch has in no wider dtype
TOLERANCES = dict.fromkeys(MODELS, TOLERANCE) | {IN_FLOAT32: 4 * TOLERANCE}


@cache
def model_of(name: str) -> PreTrainedModel:
    """Return a model in float64, in which rounding hides no difference, and makes none."""
    model = MODELS[name]().to(torch.float32 if name == IN_FLOAT32 else torch.float64)
    use_packed_attention(model)
    return model


def columns_of(groups: list[Group], seed: int, vocab_size: int) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    prompts, responses, numbers = sizes(groups)
    tokens = [random.integers(vocab_size, size=prompt) for prompt, _ in groups]
    prompt_ids = np.concatenate([tokens[number] for number in numbers])
    response_ids = random.integers(vocab_size, size=int(responses.sum()))
    return pa.record_batch(
        {
            "prompt_ids": jagged(prompt_ids.astype(np.int32), prompts),
            "response_ids": jagged(response_ids.astype(np.int32), responses),
        }
    )


def scored(model: PreTrainedModel, columns: pa.RecordBatch, plan: RankPlan) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the rows' log-probs in the order of the rows, and the gradient of a sum of all micro-batches' losses."""
    rows = RankRows(np.arange(columns.num_rows), columns)
    lengths = row_lengths(columns["response_ids"]).tolist()
    found: dict[int, torch.Tensor] = {}
    losses = []
    for micro in (micro for rank in plan.ranks for micro in rank if micro.rows):
        row = packed_row(rows.take(micro.rows), micro.num_tokens)
        assert len(row.input_ids) == micro.num_tokens
        logprobs = packed_scores(model, row, temperature=0.8, chunk_tokens=16).logprobs
        parts = torch.split(logprobs, [lengths[number] for number in micro.rows])
        losses.extend((number + 1) * part.sum() for number, part in zip(micro.rows, parts, strict=True))
        found |= {number: part.detach() for number, part in zip(micro.rows, parts, strict=True)}
    return torch.cat([found[number] for number in sorted(found)]), gradients(model, torch.stack(losses).sum())


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(groups=GROUPS, num_ranks=RANKS, budget=BUDGETS, seed=SEEDS)
def test_log_probs_and_gradients_are_those_of_rows_of_their_own(
    name: str, groups: list[Group], num_ranks: int, budget: int, seed: int
) -> None:
    model = model_of(name)
    columns = columns_of(groups, seed, model.config.vocab_size)
    prompts, responses, numbers = sizes(groups)
    options = {"num_ranks": num_ranks, "token_budget": budget}
    shared, apart = (
        scored(model, columns, plan_forward(prompts, responses, prefixes=prefixes, **options))
        for prefixes in ((numbers, prompts), None)
    )
    torch.testing.assert_close(shared[0], apart[0], rtol=TOLERANCES[name], atol=2 * TOLERANCES[name])
    assert relative_error(shared[1], apart[1]) <= TOLERANCES[name]


def shuffled_row(share: bool) -> Iterator[list[int]]:
    prompts = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2])]
    responses = [torch.tensor([4, 5]), torch.tensor([6]), torch.tensor([7])]
    lengths = [torch.tensor(list(map(len, parts))) for parts in (prompts, responses)]
    row = pack_row(torch.cat(prompts), lengths[0], torch.cat(responses), lengths[1], share_prompts=share)
    yield row.input_ids.tolist()
    use_packed_attention(model := model_of("plain"))
    yield packed_scores(model, row, temperature=1.0, chunk_tokens=8).logprobs.tolist()


def test_sequences_share_a_prompt_wherever_they_are_in_a_row() -> None:
    tokens, logprobs = shuffled_row(share=True)
    assert tokens == [1, 2, 4, 5, 3, 6, 7]
    assert logprobs == pytest.approx(list(shuffled_row(share=False))[1], rel=TOLERANCE)


def test_keys_of_many_sequences_are_put_together_in_parts() -> None:
    """Sixty-four sequences of a prompt of 90 tokens have 38 keys for each token of the row."""
    model = model_of("plain")
    columns = columns_of([(90, [1] * 64), (3, [2])], 0, model.config.vocab_size)
    row = packed_row(columns, 90 + 64 + 5)
    assert row.shared_keys is not None
    assert len(row.shared_keys) == 5
    assert max(len(keys.index) for keys in row.shared_keys) <= 8 * len(row.input_ids)
    shared, apart = (
        packed_scores(model, packed, temperature=1.0, chunk_tokens=64).logprobs for packed in (row, packed_row(columns))
    )
    torch.testing.assert_close(shared, apart, rtol=TOLERANCE, atol=2 * TOLERANCE)
    assert relative_error(*(gradients(model, logprobs.sum()) for logprobs in (shared, apart))) <= TOLERANCE


def test_prompts_that_differ_within_a_group_are_an_error() -> None:
    """The plan takes them for equal, and a micro-batch would have more tokens than its budget."""
    columns = columns_of([(4, [3]), (4, [2])], 0, 50)
    plan = plan_forward([4, 4], [3, 2], num_ranks=1, token_budget=9, prefixes=([0, 0], [4, 4]))
    (micro,) = plan.rank(0)
    with pytest.raises(ScoringError, match=r"2 rows has 13 tokens, but is planned for 9.*share_prompts = false"):
        packed_row(columns, micro.num_tokens)


def test_families_that_can_and_those_that_say_why_not() -> None:
    shared = {
        name: check_structure(getattr(transformers, f"{name}Config")(), 10**9).shared
        for name in ("Qwen3", "Gemma2", "GptOss", "Qwen3_5Text", "Mamba")
    }
    assert shared["Qwen3"] is shared["Gemma2"] is shared["GptOss"] is None
    assert "recurrent layers" in str(shared["Qwen3_5Text"])
    assert "differ from those of its own forward" in str(shared["Mamba"])  # packed at all


def all_keys(start: int, stop: int, *_: object) -> torch.Tensor:
    return torch.ones(stop - start, stop, dtype=torch.bool)


def test_the_probe_finds_sequences_that_see_each_other_through_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3()
    use_packed_attention(model)
    leak_probe(model, share_prompts=True)
    monkeypatch.setattr("rl_core.scoring.attention.visible_keys", all_keys)
    leak_probe(model)  # alone, no sequence has fewer queries than keys
    with pytest.raises(ScoringError, match=r"with a shared prompt, .*; set packing\.share_prompts = false"):
        leak_probe(model, share_prompts=True)
