"""The rows that steps and their extra groups take, of one file and of several weighted ones."""

import doctest
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import infra.datasets.prompts
from infra.datasets import PromptDataset
from rl_core.rollout.seeding import derive_seed
from tests.support.dataset_rows import dataset_of


def test_the_docstring_examples_run() -> None:
    assert doctest.testmod(infra.datasets.prompts).failed == 0


@given(
    size=st.integers(1, 30),
    num_prompts=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    num_steps=st.integers(1, 12),
)
def test_steps_are_windows_of_whole_epochs(size: int, num_prompts: int, seed: int, num_steps: int) -> None:
    prompts = dataset_of(size)
    steps = [prompts.rows_for_step(step, num_prompts, seed, shuffle=True) for step in range(num_steps)]
    taken = np.concatenate(steps)
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert all(len(rows) == num_prompts for rows in steps)


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    prompts = dataset_of(50)
    first, again = (prompts.rows_for_step(0, 50, 7, shuffle=True) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, prompts.rows_for_step(1, 50, 7, shuffle=True))
    assert not np.array_equal(first, prompts.rows_for_step(0, 50, 8, shuffle=True))
    assert np.array_equal(first[25:], prompts.rows_for_step(1, 25, 7, shuffle=True))


def test_without_shuffling_steps_follow_the_file() -> None:
    assert dataset_of(5).rows_for_step(1, 3, 0, shuffle=False).tolist() == [3, 4, 0]
    assert dataset_of(5).rows_for_groups(1, range(2, 6), 3, 0, shuffle=False).tolist() == [0, 1, 2, 3]


@given(
    size=st.integers(1, 30),
    num_prompts=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 9),
    groups=st.lists(st.integers(0, 60), unique=True).map(sorted),
    shuffle=st.booleans(),
)
def test_extra_groups_take_rows_that_the_step_does_not_have(
    size: int, num_prompts: int, seed: int, step: int, groups: list[int], shuffle: bool
) -> None:
    prompts = dataset_of(size)
    rows = prompts.rows_for_groups(step, range(61), num_prompts, seed, shuffle)
    own = prompts.rows_for_step(step, num_prompts, seed, shuffle)
    assert np.array_equal(rows[:num_prompts], own)
    others = size - len(set(own))
    extra = rows[num_prompts : num_prompts + others].tolist()
    assert set(extra) <= set(range(size)) - set(own.tolist())
    assert len(set(extra)) == len(extra)
    # A row is a function of its group's number, not of the other groups in the call.
    assert prompts.rows_for_groups(step, groups, num_prompts, seed, shuffle).tolist() == rows[groups].tolist()


def test_each_step_has_its_own_extra_rows() -> None:
    prompts = dataset_of(50)
    extra = [prompts.rows_for_groups(step, range(4, 24), 4, 7, shuffle=True) for step in (0, 1)]
    assert not np.array_equal(*extra)
    assert not np.array_equal(extra[0], prompts.rows_for_groups(0, range(4, 24), 4, 8, shuffle=True))


def mix_of(sizes: Sequence[int], weights: Sequence[float]) -> PromptDataset:
    return PromptDataset.mix([dataset_of(size) for size in sizes], weights)


def sources_of(rows: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


def test_the_mix_by_hand() -> None:
    # floor(3 n / 4) increases at n = 1, 2, 3, 5, 6, 7, ...: the first source's prompts, which take its rows 0 and 1.
    mixed = mix_of([2, 3], [0.3, 0.1])
    assert mixed.rows_for_step(0, 4, 0, shuffle=False).tolist() == [2, 0, 1, 0]
    assert mixed.rows_for_step(1, 4, 0, shuffle=False).tolist() == [3, 1, 0, 1]
    assert mixed.rows_for_step(1, 2, 0, shuffle=False).tolist() == [1, 0]
    assert mixed.rows_for_groups(1, range(6), 4, 0, shuffle=False).tolist() == [3, 1, 0, 1, 4, 0]


SOURCE = st.tuples(st.integers(1, 12), st.floats(0.01, 100).map(lambda weight: round(weight, 3)))
SOURCES = st.lists(SOURCE, min_size=1, max_size=5)  # sizes and weights


@given(
    sources=SOURCES,
    num_prompts=st.integers(1, 20),
    first=st.integers(0, 1000),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_every_window_follows_the_weights(
    sources: list, num_prompts: int, first: int, seed: int, shuffle: bool
) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    steps = [mixed.rows_for_step(step, num_prompts, seed, shuffle) for step in range(first, first + 8)]
    taken = sources_of(np.concatenate(steps), sizes)
    for source, weight in enumerate(weights):
        expected = len(taken) * weight / sum(weights)
        assert abs((taken == source).sum() - expected) < len(sizes) + 1e-6


@given(sources=SOURCES, seed=st.integers(0, 2**40))
def test_each_source_has_its_own_whole_epochs(sources: list, seed: int) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    rows = np.concatenate([mixed.rows_for_step(step, 10, seed, shuffle=True) for step in range(12)])
    for source, size in enumerate(sizes):
        mine = rows[sources_of(rows, sizes) == source] - sum(sizes[:source])
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(
    sources=SOURCES,
    num_prompts=st.integers(1, 8),
    step=st.integers(0, 9),
    seed=st.integers(0, 2**40),
    groups=st.lists(st.integers(0, 40), unique=True).map(sorted),
    shuffle=st.booleans(),
)
def test_extra_groups_of_several_sources(
    sources: list, num_prompts: int, step: int, seed: int, groups: list[int], shuffle: bool
) -> None:
    sizes, weights = zip(*sources, strict=True)
    mixed = mix_of(sizes, weights)
    rows = mixed.rows_for_groups(step, range(41), num_prompts, seed, shuffle)
    assert np.array_equal(rows[:num_prompts], mixed.rows_for_step(step, num_prompts, seed, shuffle))
    assert mixed.rows_for_groups(step, groups, num_prompts, seed, shuffle).tolist() == rows[groups].tolist()
    taken = sources_of(rows, sizes)
    for source, size in enumerate(sizes):
        own = set(rows[:num_prompts][taken[:num_prompts] == source].tolist())
        extra = rows[num_prompts:][taken[num_prompts:] == source].tolist()[: size - len(own)]
        assert not own & set(extra)
        assert len(set(extra)) == len(extra)
    # The sources alternate as they would in a longer step.
    longer = mix_of(sizes, weights).rows_for_step(0, num_prompts * step + 41, seed, shuffle)
    assert np.array_equal(taken, sources_of(longer, sizes)[num_prompts * step :])


@given(
    size=st.integers(1, 20),
    num_prompts=st.integers(1, 12),
    step=st.integers(0, 9),
    seed=st.integers(0, 2**40),
    weight=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_one_source_has_the_order_of_one_file(size: int, num_prompts: int, step: int, seed: int, weight: float) -> None:
    def permutation(seed: object) -> np.ndarray:
        return np.random.Generator(np.random.PCG64(seed)).permutation(size)  # type: ignore[arg-type]

    first, last = step * num_prompts, (step + 1) * num_prompts
    epochs = np.concatenate([permutation([seed, epoch]) for epoch in range(last // size + 1)])
    own = epochs[first:last]
    orders = [permutation(derive_seed(seed, "further", step, epoch)) for epoch in range(30 // size + 1)]
    extra = [row for order in orders for row in sorted(order, key=lambda row: row in own)]
    rows = mix_of([size], [weight]).rows_for_groups(step, range(num_prompts + 30), num_prompts, seed, shuffle=True)
    assert rows.tolist() == [*own, *extra[:30]]


def test_sources_of_one_size_are_in_different_orders() -> None:
    mixed = mix_of([50, 50], [1, 1])
    rows = mixed.rows_for_step(0, 100, 7, shuffle=True)
    assert not np.array_equal(rows[rows < 50], rows[rows >= 50] - 50)
    assert (rows[0::2] >= 50).all()
