"""Counter-based random numbers: a function of seed and position only, so that rows don't affect each other."""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive_seed(*parts: int | str) -> int:
    """Hash `parts`, in order, to an unsigned 64-bit seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def uniforms(seeds: np.ndarray, num_positions: int) -> np.ndarray:
    """Return one uniform number in [0, 1) per seed and position: SplitMix64 at counter `position`.

    SplitMix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators". Only the 52 high bits are
    used, so that u * total < total holds for every positive double `total`, also after rounding.

    Args:
        seeds: uint64 [N].
        num_positions: P.

    Returns:
        float64 [N, P]; the entry (i, p) doesn't depend on N, P or the other seeds.
    """
    counters = np.arange(1, num_positions + 1, dtype=np.uint64) * _GOLDEN
    state = _mix(seeds.astype(np.uint64))[:, None] + counters
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
