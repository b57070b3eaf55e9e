"""What rows begin with in common, as a system prompt: it is found, counted and computed once in a micro-batch."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.columns.jagged import PREFIX_COLUMN, jagged, row_lengths
from rl_core.columns.prompts import find_prefixes, number_prefixes
from rl_core.planning import plan_forward, plan_step
from rl_core.scoring import packed_scores, use_packed_attention
from rl_core.training.rows import packed_row
from schemas.errors import PlanError
from tests.support.packed import tiny_qwen3
from tests.unit.rl_core.gradients import gradients, relative_error

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=9)


def num_saved(prompts: list[np.ndarray], numbers: np.ndarray, lengths: np.ndarray) -> int:
    firsts = {int(number): int(length) for number, length in zip(numbers, lengths, strict=True)}
    return int(lengths.sum()) - sum(firsts.values())


def most_saved(rows: list[tuple[int, ...]]) -> int:
    """Return what the best division of sorted rows into runs saves, by trying each."""
    best = 0
    for size in range(1, len(rows) + 1):
        run, common = rows[:size], 0
        while size > 1 and all(len(row) > common and row[common] == run[0][common] for row in run):
            common += 1
        best = max(best, common * (size - 1) + most_saved(rows[size:]))
    return best


@given(PROMPTS)
def test_prefixes_save_as_much_as_can_be(given_prompts: list[list[int]]) -> None:
    prompts = [np.array(prompt) for prompt in given_prompts]
    found = find_prefixes(prompts, 0)
    assert found is not None
    numbers, lengths = found
    assert all(1 <= length <= len(prompt) for length, prompt in zip(lengths, prompts, strict=True))
    for number in set(numbers.tolist()):
        firsts = {tuple(prompts[row][: lengths[row]]) for row in np.flatnonzero(numbers == number)}
        assert len(firsts) == 1
    assert num_saved(prompts, numbers, lengths) >= most_saved(sorted(map(tuple, given_prompts)))
    assert number_prefixes(prompts, lengths).tolist() == numbers.tolist()


def test_too_little_in_common_is_not_shared() -> None:
    prompts = [np.array([1, 2, 3]), np.array([1, 4, 5])]
    assert find_prefixes(prompts, 10) is not None  # one token of 10
    assert find_prefixes(prompts, 11) is None


def rows() -> tuple[pa.RecordBatch, tuple[np.ndarray, np.ndarray]]:
    """Return rows of two system prompts and of none, and their prefixes."""
    random, systems = np.random.default_rng(0), [np.arange(20, 30), np.arange(40, 47)]
    prompts = [np.concatenate([systems[at % 2], random.integers(0, 60, 1 + at)]) for at in range(6)]
    prompts.append(np.array([60]))
    lengths = np.array([3, 1, 4, 2, 5, 2, 3])
    found = find_prefixes(prompts, 80)
    assert found is not None
    columns = {
        "prompt_ids": jagged(np.concatenate(prompts).astype(np.int32), np.array([len(each) for each in prompts])),
        "response_ids": jagged(random.integers(0, 60, lengths.sum()).astype(np.int32), lengths),
        PREFIX_COLUMN: pa.array(found[1], pa.int32()),
    }
    return pa.record_batch(columns), found


def test_plans_count_a_prefix_once_and_update_the_same_rows() -> None:
    columns, prefixes = rows()
    sizes = [row_lengths(columns[name]) for name in ("prompt_ids", "response_ids")]
    options = {"num_updates": 2, "num_ranks": 2, "token_budget": 60, "seed": 1}
    shared, apart = (plan_step(*sizes, sizes[1], **options, prefixes=each) for each in (prefixes, None))
    for one, other in zip(shared.updates, apart.updates, strict=True):
        assert set(one.rows) == set(other.rows)
        assert (one.num_loss_tokens, one.num_observation_tokens) == (other.num_loss_tokens, 0)
        for micro in (micro for rank in one.ranks for micro in rank):
            assert micro.num_tokens == (len(packed_row(columns.take(pa.array(micro.rows)), micro.num_tokens).input_ids))
    assert sum(each.num_tokens for each in shared.updates) < sum(each.num_tokens for each in apart.updates)
    with pytest.raises(PlanError, match="7 numbers and 7 lengths of what 7 rows begin with"):
        plan_forward(*sizes, num_ranks=1, token_budget=60, prefixes=(prefixes[0], sizes[0] + 1))


def test_scores_and_gradients_are_those_of_rows_apart() -> None:
    columns, prefixes = rows()
    sizes = [row_lengths(columns[name]) for name in ("prompt_ids", "response_ids")]
    (micro,) = plan_forward(*sizes, num_ranks=1, token_budget=200, prefixes=prefixes).rank(0)
    taken, model = columns.take(pa.array(micro.rows)), tiny_qwen3()
    use_packed_attention(model)
    packed = [packed_row(taken, num_tokens) for num_tokens in (micro.num_tokens, None)]
    assert [len(row.input_ids) for row in packed] == [micro.num_tokens, int(sum(map(sum, sizes)))]
    assert torch.equal(packed[0].targets, packed[1].targets)
    assert torch.equal(packed[0].response_lengths, packed[1].response_lengths)
    found = []
    for row in packed:
        logprobs = packed_scores(model, row, temperature=1.0, chunk_tokens=8).logprobs
        weights = torch.linspace(-1, 1, len(logprobs))
        found.append((logprobs.detach(), gradients(model, (logprobs * weights).sum())))
    assert relative_error(*([logprobs] for logprobs, _ in found)) < 1e-6
    assert relative_error(*(gradient for _, gradient in found)) < 1e-6
