"""Seeds of samples, and the uniforms that they give."""

import numpy as np

from rl_core.rollout.seeding import derive_seed, uniforms


def test_uniforms_are_a_function_of_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    values = uniforms(seeds, 50)
    assert np.array_equal(uniforms(seeds[1:2], 7)[0], values[1, :7])
    assert values.shape == (3, 50)
    assert len(np.unique(values)) == 150
    # SplitMix64's published first output for state 0; seeds are mixed into states, and mix(0) is 0.
    assert values[0, 0] == (0xE220A8397B1DCDAF >> 12) / 2**52


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    values = uniforms(np.arange(2000, dtype=np.uint64), 50)
    assert np.all((values >= 0) & (values < 1))
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    centered = values - 0.5
    for neighbor in (centered[1:, :] * centered[:-1, :], centered[:, 1:] * centered[:, :-1]):
        assert abs(neighbor.mean()) < 5 / 12 / np.sqrt(neighbor.size)


def test_seeds_differ_by_every_part() -> None:
    seeds = {derive_seed(0, "train", step, group, n) for step in range(5) for group in range(5) for n in range(5)}
    assert len(seeds) == 125
    assert derive_seed(0, "train", 1, 2, 3) == derive_seed(0, "train", 1, 2, 3)
    assert derive_seed(1, 23) != derive_seed(12, 3)
