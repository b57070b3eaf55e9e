"""Views over several chunks: concatenation of batches, and pruning."""

import pytest

from rl_core.views import concat, decode_ints, select, with_column
from schemas.batch import ChunkRef
from schemas.errors import ColumnError
from tests.unit.rl_core.stored_batches import Stored, batch, check, chunks, pieces, prune, rows_of


def test_prune_drops_unused_chunks() -> None:
    view = with_column(batch([3, 0, 2, 4]), {"advantages": "float"}, chunks([9], "advantage"), range(9))
    small = prune(select(view, [8, 1, 5]))
    assert [chunk.key for chunk in small.groups[0].chunks] == ["run/1/rollout/0/0", "run/1/rollout/3/0"]
    assert pieces(small.groups[0]) == [(1, 3, 4), (0, 1, 2), (1, 0, 1)]
    assert small.groups[1] == select(view, [8, 1, 5]).groups[1]
    assert prune(small) == small
    assert prune(view).groups[0].chunks == tuple(chunks([3, 0, 2, 4])[at] for at in (0, 2, 3))


def test_ranges_that_become_adjacent_by_a_prune_are_merged() -> None:
    small = prune(select(batch([2, 1, 2]), [0, 1, 3, 4]))
    assert decode_ints(small.groups[0].segments.counts).tolist() == [4]
    assert pieces(small.groups[0]) == [(0, 0, 2), (1, 0, 2)]


def test_a_pruned_view_is_concatenated_with_an_unpruned_one() -> None:
    left = select(batch([2, 1, 2]), [4, 2, 0])
    right = prune(select(batch([2, 1, 2]), [3, 4, 1]))
    check(concat([left, right]), [4, 2, 0, 3, 4, 1])
    swapped = concat([right, left])
    assert [chunk.key for chunk in swapped.groups[0].chunks] == [f"run/1/rollout/{at}/0" for at in (0, 2, 1)]
    assert pieces(swapped.groups[0]) == [(1, 0, 2), (0, 1, 2), (1, 1, 2), (2, 0, 1), (0, 0, 1)]


def test_batches_over_different_chunks_are_concatenated() -> None:
    left, right = batch([2, 1]), batch([3])
    right = right.replace(groups=(right.groups[0].replace(chunks=tuple(chunks([3], "other"))),))
    both = concat([select(left, [2, 0]), right, select(left, range(1, 2))])
    assert [chunk.key for chunk in both.groups[0].chunks] == [
        "run/1/rollout/0/0",
        "run/1/rollout/1/0",
        "run/1/other/0/0",
    ]
    assert pieces(both.groups[0]) == [(1, 0, 1), (0, 0, 1), (2, 0, 3), (0, 1, 2)]


def test_batches_with_different_column_groups_are_concatenated() -> None:
    def stored(stage: str) -> list[ChunkRef]:
        return chunks([5], stage)

    apart = with_column(batch(), {"behavior_logprobs": "float"}, stored("a"), range(5))
    apart = with_column(apart, {"reference_logprobs": "float"}, stored("b"), range(5))
    joint = with_column(batch(), {"behavior_logprobs": "float", "reference_logprobs": "float"}, stored("c"), range(5))
    both = concat([apart, joint])
    assert both.columns == apart.columns
    assert [[chunk.key for chunk in group.chunks] for group in both.groups[1:]] == [
        ["run/1/a/0/0", "run/1/c/0/0"],
        ["run/1/b/0/0", "run/1/c/0/0"],
    ]
    assert all(rows_of(group) == list(range(10)) for group in both.groups[1:])


def test_concatenated_batches_keep_the_rows_of_every_group() -> None:
    stored = Stored([2, 3], [[4, 0, 3, 1, 2], [1, 3, 2, 4, 0]])
    parts = [
        select(stored.batch, [3, 1]),
        prune(select(stored.batch, range(1, 4))),
        select(stored.batch, [4, 2, 0, 1, 3]),
    ]
    stored.check(concat(parts), [3, 1, 1, 2, 3, 4, 2, 0, 1, 3])


def test_batches_of_different_kinds_are_not_concatenated() -> None:
    with pytest.raises(ValueError, match="no batches"):
        concat([])
    with pytest.raises(ValueError, match="different"):
        concat([batch(), batch().replace(step=2)])
    extended = with_column(batch(), {"advantages": "float"}, chunks([5], "advantage"), range(5))
    for pair in ([batch(), extended], [extended, batch()]):
        with pytest.raises(ColumnError, match="different columns"):
            concat(pair)
