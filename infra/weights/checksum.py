"""The checksum of a flat buffer, computed on the buffer's device: on the CPU, or on CUDA without a copy.

Position-weighted sums in the manner of Fletcher (IEEE Transactions on Communications 30(1), 1982, page 247), over
little-endian signed 64-bit words w_i, i = 0, 1, ..., and their upper halves h_i = floor(w_i / 2^32):

    sum w_i,  sum i w_i,  sum h_i,  sum i h_i      all modulo 2^64

Any change of one or two words, including swapping two words, changes at least one of the four sums, in buffers of
less than 32 GiB. Proof: let the upper halves of the words i and j change by e_i and e_j, each less than 2^32 in
magnitude. If they change at all, the last two sums are unchanged only if e_i + e_j = 0 and (i - j) e_i = 0 modulo 2^64;
but the latter product is less than 2^64 in magnitude and not 0. If only lower halves change, the same holds for the
first two sums. The size is not part of the checksum: compare it separately.
"""

from typing import Any

import numpy as np
import torch

_COLUMNS = 1024  # words per row; the sums along both axes of a block are plain additions
_CPU_ROWS = 64  # a block of 512 KiB stays in a core's cache between its four sums
_CUDA_ROWS = 8192  # 64 MiB: few launches
_MODULUS = 2**64


class Checksum:
    """The checksum of a buffer that is given in parts, in order."""

    def __init__(self) -> None:
        self._num_words = 0
        self._sums = [0, 0, 0, 0]

    def update(self, part: torch.Tensor) -> None:
        """Add the next bytes.

        Args:
            part: uint8 [n], n a multiple of 8, contiguous, on any device.
        """
        words = part.view(torch.int64)
        # Not torch on the CPU: its threads cost more than such small sums.
        array: Any = words if part.is_cuda else words.numpy()
        for first in range(0, len(array), block := (_CUDA_ROWS if part.is_cuda else _CPU_ROWS) * _COLUMNS):
            self._add(array[first : first + block])

    def hexdigest(self) -> str:
        """Return the four sums as 64 hexadecimal digits."""
        return "".join(f"{total:016x}" for total in self._sums)

    def _add(self, words: Any) -> None:
        whole = len(words) // _COLUMNS * _COLUMNS
        for rows in (words[:whole].reshape(-1, _COLUMNS), words[whole:].reshape(1, -1)):
            for at, values in ((0, rows), (2, rows >> 32)):
                plain, weighted = _sums(values)
                self._sums[at] = (self._sums[at] + plain) % _MODULUS
                self._sums[at + 1] = (self._sums[at + 1] + weighted + self._num_words * plain) % _MODULUS
            self._num_words += rows.shape[0] * rows.shape[1]


def checksum(buffer: torch.Tensor) -> str:
    """Return the checksum of a whole buffer, uint8 [n], n a multiple of 8."""
    whole = Checksum()
    whole.update(buffer)
    return whole.hexdigest()


def _sums(values: Any) -> tuple[int, int]:
    """Return the sum of a matrix's words, and the sum of their products with their positions, modulo 2^64.

    Args:
        values: int64 [R, C], a torch tensor or a numpy array; int64 sums wrap around in both.
    """
    by_row, by_column = values.sum(1), values.sum(0)
    rows, columns = _positions(by_row), _positions(by_column)
    return int(by_row.sum()), values.shape[1] * int((by_row * rows).sum()) + int((by_column * columns).sum())


def _positions(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return torch.arange(len(values), device=values.device)
    return np.arange(len(values))
