"""Rows that branch: log-probs and gradients are those of each path alone, for every tree, packing and sharing."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from infra.history.row_tokens import MAX_NAME, tree_of, turns_of
from rl_core.columns.jagged import BRANCH_COLUMNS, branches_of, jagged, pairs_apart, row_lengths, unbranched
from rl_core.padded import VERL, unnest
from rl_core.planning import plan_forward, plan_step
from rl_core.planning.balance import QUADRATIC_COST, row_costs
from rl_core.scoring import Branch, leak_probe, pack_row, packed_scores
from rl_core.training.rows import packed_row
from schemas.errors import ColumnError, PlanError, ScoringError
from tests.unit.rl_core.gradients import gradients, relative_error
from tests.unit.rl_core.padded_batches import never_padded
from tests.unit.rl_core.test_shared_prompts import MODELS, TOLERANCES, model_of

Tree = tuple[int, list[tuple[int, int, float]]]  # prompt tokens; of each turn, tokens before it and of it, and a parent

# The parent is a share of the tokens so far: 1 is the last one, so that the turn doesn't branch, and 0 none.
TREES = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from((0.0, 0.2, 0.5, 0.8, 1.0))),
            min_size=1,
            max_size=6,
        ),
    ),
    min_size=1,
    max_size=4,
)


def columns_of(trees: list[Tree], seed: int, vocab_size: int, *, same_prompt: bool = False) -> pa.RecordBatch:
    """Return the rows of trees as a rollout stores them."""
    random = np.random.default_rng(seed)
    prompts, responses = [], []
    tokens, between, parents = [], [], []
    for prompt, turns in trees:
        prompt = trees[0][0] if same_prompt else prompt
        sizes = [(before if at else 0, own) for at, (before, own, _) in enumerate(turns)]
        starts = np.cumsum([0, *map(sum, sizes)])[:-1]
        prompts.append(random.integers(vocab_size, size=prompt))
        responses.append(random.integers(vocab_size, size=sum(map(sum, sizes))))
        tokens.append([own for _, own in sizes])
        between.append([*(before for before, _ in sizes[1:]), 0])
        parents.append(
            [
                -1,
                *(
                    round((prompt + start) * share) - prompt - 1
                    for start, (_, _, share) in zip(starts[1:], turns[1:], strict=True)
                ),
            ]
        )
    if same_prompt:
        prompts = [prompts[0]] * len(prompts)
    lists = dict(
        zip(
            ("prompt_ids", "response_ids", *BRANCH_COLUMNS), (prompts, responses, tokens, between, parents), strict=True
        )
    )
    return pa.record_batch({name: jagged([np.asarray(row, np.int32) for row in rows]) for name, rows in lists.items()})


def paths_of(columns: pa.RecordBatch) -> tuple[list[np.ndarray], list[list[tuple[int, int, int]]]]:
    """Return the tokens of each row's paths, and for each of its response tokens its path and place there."""
    paths: list[np.ndarray] = []
    places = []
    for row in columns.to_pylist():
        all_ids, num_prompt = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
        sizes = [sum(pair) for pair in zip([0, *row["turn_bridge_tokens"][:-1]], row["turn_tokens"], strict=True)]
        before = list(range(num_prompt))  # the token numbers of a path
        path_to = {at: before[: at + 1] for at in range(num_prompt)} | {-1: []}
        found = []
        for (start, stop), parent in zip(pairwise(np.cumsum([0, *sizes]).tolist()), row["turn_parents"], strict=True):
            path = [*path_to[num_prompt + parent], *range(num_prompt + start, num_prompt + stop)]
            for at in range(num_prompt + start, num_prompt + stop):
                path_to[at] = path[: path.index(at) + 1]
                found.append((len(paths), path.index(at), at))
            paths.append(np.array([all_ids[at] for at in path]))
        places.append(found)
    return paths, places


def scored_alone(model: PreTrainedModel, columns: pa.RecordBatch) -> torch.Tensor:
    """Score each path in a row of its own; the token that nothing predicts has the log-prob 0."""
    paths, places = paths_of(columns)
    scores = []
    for path in paths:
        ids = torch.from_numpy(path)
        row = pack_row(ids[:1], np.array([1]), ids[1:], np.array([len(ids) - 1]))
        logprobs = packed_scores(model, row, temperature=0.8, chunk_tokens=16).logprobs
        scores.append(torch.cat([logprobs.new_zeros(1), logprobs]))
    return torch.stack([scores[path][at] for row in places for path, at, _ in row])


def has_predictor(columns: pa.RecordBatch) -> torch.Tensor:
    return torch.tensor([at > 0 for row in paths_of(columns)[1] for _, at, _ in row])


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(TREES, st.integers(0, 9), st.booleans())
def test_branched_rows_score_as_their_paths(name: str, trees: list[Tree], seed: int, same_prompt: bool) -> None:
    model = model_of(name)
    columns = columns_of(trees, seed, model.config.get_text_config().vocab_size, same_prompt=same_prompt)
    prompts = [len(row) for row in columns["prompt_ids"].to_pylist()]
    shared = sum(prompts[1:]) if same_prompt else 0
    total = sum(prompts) + sum(map(len, columns["response_ids"].to_pylist()))
    row = packed_row(columns, total - shared)
    assert len(row.input_ids) == total - shared  # each token is computed once
    keep = has_predictor(columns)
    weights = torch.linspace(0.5, 1.5, len(keep))
    ours = packed_scores(model, row, temperature=0.8, chunk_tokens=16).logprobs
    found = gradients(model, (ours * weights)[keep].sum()) if keep.any() else None
    alone = scored_alone(model, columns)
    torch.testing.assert_close(ours[keep], alone[keep], rtol=TOLERANCES[name], atol=TOLERANCES[name])
    if found is not None:
        assert relative_error(found, gradients(model, (alone * weights)[keep].sum())) < TOLERANCES[name]


@given(TREES, st.booleans(), st.integers(1, 3))
def test_a_row_costs_what_its_tokens_attend_to(trees: list[Tree], same_prompt: bool, num_ranks: int) -> None:
    columns = columns_of(trees, 0, 9, same_prompt=same_prompt)
    prompts, responses = (row_lengths(columns[name]) for name in ("prompt_ids", "response_ids"))
    branches = branches_of(*(columns[name] for name in BRANCH_COLUMNS))
    apart = pairs_apart(prompts, responses, branches)
    assert bool(apart) == bool(len(branches.row))
    keys = [
        [*range(1, prompt + 1), *(place + 1 for _, place, _ in found)]
        for prompt, found in zip(prompts.tolist(), paths_of(columns)[1], strict=True)
    ]
    # In causal attention of a whole row, a token has half of the row's as its keys, on average: this counts twice.
    costs = [sum(1 + QUADRATIC_COST * (2 * count - 1) for count in row) for row in keys]
    lengths = prompts + responses
    assert row_costs(lengths, np.array(apart, np.float64) if apart else None).tolist() == costs
    options = {"num_ranks": num_ranks, "token_budget": 1000, "pairs_apart": apart}
    assert sum(plan_forward(prompts, responses, **options).rank_costs) == sum(costs)
    step = plan_step(prompts, responses, responses, num_updates=1, seed=0, **options).updates[0]
    assert sum(step.rank_costs) == sum(costs)
    prefixes = np.zeros_like(prompts), prompts
    shared = plan_forward(prompts, responses, **options | {"num_ranks": 1}, prefixes=prefixes)
    once = sum(row_costs(np.unique(prompts)))  # equal ones of a group are shared
    assert shared.rank_costs == (sum(costs) - sum(row_costs(prompts)) + once,)


def test_rows_that_branch_are_balanced_by_what_they_attend_to() -> None:
    prompts, responses = np.full(4, 2), np.full(4, 4094)
    apart = np.array([0, 0, 2048**2, 2048**2])  # the last two are two paths of 2048 tokens each, with nothing in common
    options = {"num_ranks": 2, "token_budget": 8192}
    plan = plan_forward(prompts, responses, pairs_apart=apart, **options)
    assert [set(micro.rows) for rank in plan.ranks for micro in rank] in ([{0, 2}, {1, 3}], [{0, 3}, {1, 2}])
    assert plan.rank_costs == (2 * 4096 + (4096**2 + 2 * 2048**2) * QUADRATIC_COST,) * 2
    assert plan_forward(prompts, responses, **options).rank_costs == (2 * (4096 + 4096**2 * QUADRATIC_COST),) * 2
    with pytest.raises(PlanError, match="3 counts of pairs for 4 rows"):
        plan_forward(prompts, responses, pairs_apart=apart[1:], **options)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1), st.integers(1, 4))
def test_rows_without_branches_are_planned_as_before(rows: list[tuple[int, int]], num_ranks: int) -> None:
    prompts, responses = (np.array(column) for column in zip(*[*rows, (1, 1)], strict=True))
    options = {"num_ranks": num_ranks, "token_budget": 60}
    nothing = np.zeros(len(prompts))
    assert plan_forward(prompts, responses, pairs_apart=nothing, **options) == plan_forward(
        prompts, responses, **options
    )


def test_branches_of_columns() -> None:
    columns = columns_of([(4, [(0, 2, 1), (1, 3, 1.0)]), (2, [(0, 2, 1), (2, 1, 0.5), (0, 2, 0.0)])], 0, 9)
    found = branches_of(*(columns[name] for name in BRANCH_COLUMNS))
    assert [each.tolist() for each in found] == [[1, 1], [1, 2], [2, 5], [-1, -3]]
    nothing = branches_of(*(columns[name][:0] for name in BRANCH_COLUMNS))
    assert [len(each) for each in nothing] == [0] * 4


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ([Branch(0, 1, 3)], "can't go from token 3 to response token 1"),
        ([Branch(0, 4, 0)], "can't go from token 0 to response token 4"),
        ([Branch(0, 2, 0), Branch(0, 1, 0)], "can't go"),
        ([Branch(1, 1, 0)], r"branches of sequences \[1\]"),
    ],
)
def test_wrong_branches(branches: list[Branch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_row(torch.tensor([5, 6]), np.array([2]), torch.tensor([1, 2, 3, 4]), np.array([4]), branches=branches)


@pytest.mark.parametrize("name", MODELS)
def test_the_probe_checks_a_branch(name: str) -> None:
    leak_probe(model_of(name), branches=True)


def test_the_probe_finds_branches_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: object, branches: object = (), **options: object) -> object:
        return pack_row(*arguments, **options)

    monkeypatch.setattr("rl_core.scoring.comparison.pack_row", without)
    with pytest.raises(ScoringError, match="with a branch of a trajectory"):
        leak_probe(model_of(next(iter(MODELS))), branches=True)


def test_rows_without_branches_have_these_parents() -> None:
    columns = columns_of([(4, [(0, 2, 1.0), (1, 3, 1.0)]), (2, [(0, 2, 1.0), (2, 1, 1.0), (0, 2, 1.0)])], 0, 9)
    assert unbranched(*(columns[name] for name in BRANCH_COLUMNS[:2])).equals(columns[BRANCH_COLUMNS[2]])


def test_rows_that_branch_have_no_padded_form() -> None:
    columns = columns_of([(4, [(0, 2, 1.0)]), (4, [(0, 2, 1.0), (1, 3, 0.5)])], 0, 9)
    geometry = never_padded(columns, {"prompt": 4, "response": 9})
    with pytest.raises(ColumnError, match="row 1 branches, and so has no padded form"):
        unnest(columns, VERL, geometry, 0)


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        (-1, "branch at the prompt's end"),
        (-5, "branch at the prompt's end, less 4 tokens"),
        (2, "branch after turn 1"),
        (1, "branch after token 2 of turn 1"),
        (3, "branch after token 1 of those before turn 2"),
    ],
)
def test_where_a_branch_begins_is_said(parent: int, expected: str) -> None:
    columns = {"turn_tokens": [3, 2, 1], "turn_bridge_tokens": [2, 1, 0], "turn_parents": [-1, 2, parent]}
    arrays = {name: jagged([np.array(values, np.int32)]) for name, values in columns.items()}
    turns = turns_of(arrays, 0)
    assert [turn.get("branch") for turn in turns] == [None, None, expected]
    assert [turn["after"] for turn in turns] == [0, 1, 0 if parent < 0 else 1]


def drawn(after: list[int], texts: list[str] | None = None, max_turns: int = 99, **others: object) -> list[str]:
    turns = [{"tokens": 1, "environment_tokens": 2, "after": number, **others} for number in after]
    texts = texts or [""] * len(after)
    tree = tree_of(turns, texts, 1, is_trained="reward" in others, max_turns=max_turns)
    return tree.splitlines()


def test_a_tree_has_each_turn_below_the_one_that_it_goes_on_from() -> None:
    lines = drawn([0, 1, 2, 1, 4, 4, 0])
    assert [line.partition(":")[0] for line in lines[1:-1]] == [
        "├─ turn 1",
        "│  ├─ turn 2",
        "│  │  turn 3",
        "│  └─ turn 4",
        "│     ├─ turn 5",
        "│     └─ turn 6",
        "└─ turn 7",
    ]
    assert (lines[0], lines[-1]) == ("prompt: 1 token", "0 of 21 tokens trained")
    chain = drawn([*range(1000)], max_turns=2, reward=0.5)
    assert chain == [
        "prompt: 1 token",
        "turn 1: 1 token trained, reward 0.5",
        "turn 2: 1 token trained, after 2 of the environment, reward 0.5",
        "… 998 more turns",
        "1,000 of 3,000 tokens trained",
    ]


def test_a_name_that_a_model_has_made_up_stays_in_its_line() -> None:
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    lines = drawn([0, 1, 2], [call % "a\\n\\u202e```", call % ("a" * 99), '{"name": "b", "parameters": {}}'])
    assert len(lines) == 5
    assert lines[1] == r"turn 1: 1 token, not trained, calls 'a\n\u202e```'"
    assert f"calls '{'a' * MAX_NAME}'" in lines[2]
    assert lines[3].endswith("calls b")
