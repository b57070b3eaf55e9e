"""Plans: every row once, a hard budget, equal counts, balanced ranks, membership by seed alone, exact denominators."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_core.planning import pack, plan_forward, plan_step
from rl_core.planning.plan import rank_rows, rows_by_rank
from schemas.errors import PlanError
from schemas.plan import ForwardPlan, RankPlan, StepPlan

SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {  # lengths in tokens, int64 [n]
    "lognormal": lambda random, n: np.clip(random.lognormal(6, 1, n), 16, 8192).astype(np.int64),
    "truncated": lambda random, n: np.clip(random.lognormal(7.5, 1, n), 16, 4096).astype(np.int64),
    "uniform": lambda random, n: random.integers(16, 8193, n),
    "bimodal": lambda random, n: random.integers(100, 400, n) + 6000 * (random.random(n) < 0.2),
}

Row = tuple[int, int, int]  # prompt, response and loss tokens
ROWS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 40)).flatmap(
        lambda lengths: st.tuples(*map(st.just, lengths), st.integers(0, lengths[1]))
    ),
    min_size=1,
    max_size=40,
).filter(lambda rows: any(trained for _, _, trained in rows))
UPDATES, RANKS, BUDGETS, SEEDS = st.integers(1, 4), st.integers(1, 5), st.integers(60, 120), st.integers(0, 9)


def columns(rows: list[Row]) -> list[np.ndarray]:
    return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]


def plan_rows(rows: list[Row], **options: int) -> StepPlan:
    return plan_step(*columns(rows), **{"num_updates": 1, "num_ranks": 1, "seed": 0} | options)


def cost(rows: list[Row], members: tuple[int, ...] | list[int]) -> float:
    """Compute the linear cost of all tokens plus attention within each sequence: 2^-14 of a token's cost per pair."""
    lengths = [rows[row][0] + rows[row][1] for row in members]
    return sum(lengths) + sum(length**2 for length in lengths) / 2**14


def check_ranks(plan: RankPlan, rows: list[Row], num_ranks: int, budget: int) -> None:
    """Check the invariants of every pass over rows, in an update or for scoring."""
    assert len(plan.ranks) == len(plan.rank_costs) == num_ranks
    assert {len(rank) for rank in plan.ranks} == {plan.num_micros}
    for rank, rank_cost in zip(plan.ranks, plan.rank_costs, strict=True):
        members = [micro.rows for micro in rank]
        costs = [cost(rows, micro) for micro in members]
        assert sum(costs) == rank_cost
        assert costs == sorted(costs, reverse=True)  # so that dummies, which cost nothing, are last
        assert sum(not micro for micro in members) == max(0, plan.num_micros - sum(map(len, members)))
        for micro in rank:
            assert micro.num_tokens == sum(rows[row][0] + rows[row][1] for row in micro.rows)
            assert micro.num_tokens <= budget
            assert list(micro.rows) == sorted(micro.rows)
    blocks = [cost(rows, block.tolist()) for block in np.array_split(np.array(sorted(plan.rows)), num_ranks)]
    assert max(plan.rank_costs) <= max(blocks)
    assert max(plan.rank_costs) - min(plan.rank_costs) <= max(blocks) - min(blocks)


@given(ROWS, UPDATES, RANKS, BUDGETS, SEEDS)
def test_step_invariants(rows: list[Row], num_updates: int, num_ranks: int, budget: int, seed: int) -> None:
    options = {"num_updates": num_updates, "num_ranks": num_ranks, "token_budget": budget, "seed": seed}
    plan = plan_rows(rows, **options)
    live = [row for row, (_, _, trained) in enumerate(rows) if trained]
    assert sorted(row for update in plan.updates for row in update.rows) == live
    assert plan.num_skipped_rows == len(rows) - len(live)
    assert len(plan.updates) == min(num_updates, len(live))
    for update in plan.updates:
        check_ranks(update, rows, num_ranks, budget)
        assert update.num_loss_tokens == sum(rows[row][2] for row in update.rows)
        assert update.num_live_sequences == len(update.rows)
        assert update.num_observation_tokens == sum(rows[row][1] - rows[row][2] for row in update.rows)
    assert plan == plan_rows(rows, **options)


@given(ROWS, RANKS, BUDGETS)
def test_forward_invariants(rows: list[Row], num_ranks: int, budget: int) -> None:
    prompts, responses, _ = columns(rows)
    plan = plan_forward(prompts, responses, num_ranks=num_ranks, token_budget=budget)
    assert sorted(plan.rows) == list(range(len(rows)))
    check_ranks(plan, rows, num_ranks, budget)
    assert plan == plan_forward(prompts, responses, num_ranks=num_ranks, token_budget=budget)


@given(ROWS, UPDATES, RANKS, BUDGETS, SEEDS)
def test_plans_are_values(rows: list[Row], num_updates: int, num_ranks: int, budget: int, seed: int) -> None:
    step = plan_rows(rows, num_updates=num_updates, num_ranks=num_ranks, token_budget=budget, seed=seed)
    forward = plan_forward(*columns(rows)[:2], num_ranks=num_ranks, token_budget=budget)
    for plan in (step, forward):
        again = type(plan).model_validate_json(plan.model_dump_json())
        assert again == plan
        assert hash(again) == hash(plan)
        assert again.digest == plan.digest
        assert len({plan, again}) == 1
    assert step.replace(seed=seed + 1).digest != step.digest


@given(ROWS, UPDATES, SEEDS)
def test_membership_does_not_depend_on_ranks_or_budget(rows: list[Row], num_updates: int, seed: int) -> None:
    plans = [
        plan_rows(rows, num_updates=num_updates, num_ranks=num_ranks, token_budget=budget, seed=seed)
        for num_ranks, budget in ((1, 60), (3, 60), (2, 10_000))
    ]
    members = [[set(update.rows) for update in plan.updates] for plan in plans]
    assert members[0] == members[1] == members[2]
    sizes = [len(update) for update in members[0]]
    assert max(sizes) - min(sizes) <= 1


def test_membership_is_the_seeds_permutation() -> None:
    order = np.random.Generator(np.random.PCG64(4)).permutation(8).tolist()
    plan = plan_rows([(2, 3, 3)] * 8, num_updates=2, token_budget=64, seed=4)
    assert [set(update.rows) for update in plan.updates] == [set(order[:4]), set(order[4:])]
    assert plan != plan_rows([(2, 3, 3)] * 8, num_updates=2, token_budget=64, seed=5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "most"), [(512, 0.005), (8192, 0.0006)])
def test_ranks_are_balanced(shape: str, num_rows: int, most: float) -> None:
    for seed in range(3):
        lengths = SHAPES[shape](np.random.default_rng(seed), num_rows)
        plan = plan_forward(np.ones_like(lengths), lengths - 1, num_ranks=16, token_budget=16_384)
        assert plan.imbalance <= most


def test_micro_batches_line_up_by_cost() -> None:
    # Rank 0 has one row of 8000 tokens, which costs more than rank 1's eight of 1000, all in one micro-batch each.
    rows = [(1, 7999, 1), (1, 6999, 1)] + [(1, 999, 1)] * 20
    update = plan_rows(rows, num_ranks=2, token_budget=9000).updates[0]
    costs = [[cost(rows, micro.rows) for micro in rank] for rank in update.ranks]
    assert costs == [sorted(rank, reverse=True) for rank in costs]
    assert sum(max(pair) for pair in zip(*costs, strict=True)) <= 1.2 * cost(rows, list(range(22))) / 2


def test_ranks_without_enough_rows_get_dummies() -> None:
    update = plan_rows([(1, 9, 9)] * 3, num_ranks=2, token_budget=10).updates[0]
    assert [[len(micro.rows) for micro in rank] for rank in update.ranks] == [[1, 1], [1, 0]]
    assert update.ranks[1][1].num_tokens == 0
    assert update.num_dummies == 1


def test_more_ranks_than_rows() -> None:
    update = plan_rows([(1, 1, 1)], num_ranks=3, token_budget=4).updates[0]
    assert [[len(micro.rows) for micro in rank] for rank in update.ranks] == [[1], [0], [0]]


def test_a_row_over_budget_names_row_tokens_and_key() -> None:
    message = r"row 1 has 11 tokens.*packing\.token_budget is 10; raise packing\.token_budget to at least 11 or shorten"
    with pytest.raises(PlanError, match=message):
        plan_rows([(1, 2, 2), (5, 6, 1)], token_budget=10)
    with pytest.raises(PlanError, match=message):
        plan_forward([1, 5], [2, 6], num_ranks=1, token_budget=10)
    with pytest.raises(PlanError, match=message):
        pack(np.arange(2), np.array([3, 11]), 10)


def test_a_skipped_row_may_be_over_budget() -> None:
    plan = plan_rows([(1, 2, 2), (5, 6, 0)], token_budget=10)
    assert plan.updates[0].rows == (0,)
    assert plan.num_skipped_rows == 1


def test_nothing_to_train_on_or_to_score() -> None:
    with pytest.raises(PlanError, match="nothing to train on: none of the step's 2 rows"):
        plan_rows([(1, 2, 0), (5, 0, 0)], token_budget=10)
    with pytest.raises(PlanError, match="none of the step's 0 rows"):
        plan_step([], [], [], num_updates=1, num_ranks=1, token_budget=8, seed=0)
    for prompts in ([], [1, 5]):
        with pytest.raises(PlanError, match=f"nothing to score: none of the {len(prompts)} rows"):
            plan_forward(prompts, [0] * len(prompts), num_ranks=1, token_budget=8)


@pytest.mark.parametrize("row", [(-1, 2, 1), (1, 2, 3), (1, 2, -1), (5, -2, 0), (5, -2, -3)])
def test_impossible_counts_are_rejected(row: Row) -> None:
    with pytest.raises(PlanError, match=f"row 1 has {row[0]} prompt, {row[1]} response and {row[2]} loss tokens"):
        plan_rows([(1, 2, 1), row], token_budget=10)
    if min(row[:2]) < 0:
        with pytest.raises(PlanError, match=f"row 1 has {row[0]} prompt"):
            plan_forward([1, row[0]], [2, row[1]], num_ranks=1, token_budget=10)


@pytest.mark.parametrize("name", ["num_ranks", "num_updates", "token_budget"])
def test_numbers_below_one_are_rejected(name: str) -> None:
    with pytest.raises(PlanError, match=f"{name} 0.*each must be at least 1"):
        plan_rows([(1, 2, 1)], **{"token_budget": 10, name: 0})


def test_arrays_of_other_shapes_or_dtypes_are_rejected() -> None:
    options = {"num_ranks": 1, "token_budget": 8}
    with pytest.raises(PlanError, match="2 prompt lengths, 3 response lengths and 1 counts"):
        plan_step([1, 1], [1, 1, 1], [1], num_updates=1, seed=0, **options)
    with pytest.raises(ValueError, match="1-D"):
        plan_forward(np.ones((2, 2), dtype=int), [1, 1], **options)
    with pytest.raises(TypeError, match="float64"):
        plan_forward([1.5, 2.0], [1, 1], **options)  # type: ignore[list-item]


PLAN = {"rows": [4, 2, 0], "micro_rows": [2, 0, 1, 0], "micro_tokens": [6, 0, 3, 0], "rank_costs": (6.0, 3.0)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_costs": (1.0,) * 3}, "3 ranks have 4 micro-batches; all need the same number, at least one"),
        ({"rank_costs": ()}, "0 ranks have 4 micro-batches"),
        ({"micro_rows": [], "micro_tokens": []}, "2 ranks have 0 micro-batches"),
        ({"micro_tokens": [3, 3]}, "4 micro-batches of 3 rows have 2 numbers of tokens"),
        ({"rows": [0, 1]}, "4 micro-batches of 3 rows have 4 numbers of tokens and 2 rows"),
    ],
)
def test_plans_whose_numbers_do_not_match_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RankPlan(**PLAN | changes)


def test_the_parts_of_a_rank() -> None:
    plan = RankPlan(**PLAN)
    assert plan.ranks == (plan.rank(0), plan.rank(1))
    assert [[micro.rows for micro in rank] for rank in plan.ranks] == [[(4, 2), ()], [(0,), ()]]
    assert [[micro.num_tokens for micro in rank] for rank in plan.ranks] == [[6, 0], [3, 0]]
    assert rank_rows([plan, plan.replace(rows=[5, 3, 1])], 0).tolist() == [2, 3, 4, 5]
    assert rows_by_rank(plan).tolist() == [2, 4, 0]


STEP = """\
token budget 10, seed 0, 1 rows skipped
update  ranks  micro-batches  rows  tokens   fill  dummies  imbalance  loss tokens  sequences
     0      2              2     3      30  75.0%        1    66.667%           27          3"""
FORWARD = """\
token budget 1,000
ranks  micro-batches  rows  tokens    fill  dummies  imbalance
    2              1     4   2,000  100.0%        0     0.000%"""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        # Three rows of ten tokens fill three of four micro-batches, two on one rank: imbalance (2 - 1) / 1.5.
        (lambda: plan_rows([(1, 9, 9)] * 3 + [(1, 1, 0)], num_ranks=2, token_budget=10), STEP),
        (lambda: plan_forward([1] * 4, [499] * 4, num_ranks=2, token_budget=1000), FORWARD),
    ],
    ids=["step", "forward"],
)
def test_a_plan_prints_as_a_table(make: Callable[[], StepPlan | ForwardPlan], text: str) -> None:
    assert str(make()) == text
