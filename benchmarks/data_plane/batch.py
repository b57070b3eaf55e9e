"""The reference batch that every path carries, and the packed tensors that every path must produce.

N rows, V values over all rows of a column.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rl_core.columns.jagged import flat_values, is_jagged, jagged, row_lengths

Ints = npt.NDArray[np.int64]

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 256, 2048
MIN_PROMPT_TOKENS = 32
VOCAB_SIZE = 50_000
LOG_MEAN, LOG_SIGMA = 5.475, 1.0  # of the response lengths: long-tailed, about 370 tokens on average
TRAINED_FRACTION = 0.9
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz" * 20 + "é"))

APPENDED = "reference_logprobs"  # the column that `append` adds, to a handle without it


@dataclass(frozen=True)
class ReferenceBatch:
    """One batch, as rollout and scoring would produce it."""

    columns: pa.RecordBatch
    appended: pa.RecordBatch  # one more float32 response column of the same rows
    prompt_lengths: Ints  # [N]
    response_lengths: Ints  # [N]


@dataclass(frozen=True)
class Packed:
    """The tensors that a consumer trains on: rows concatenated without padding."""

    tokens: dict[str, tuple[torch.Tensor, torch.Tensor]]  # flat values [V] and row lengths [N]
    rows: dict[str, torch.Tensor]  # [N]
    strings: dict[str, Sequence[Any]]  # N each: an Arrow array if the path delivers one, else a list of str


def reference_batch(num_rows: int, repeats: int = 1, seed: int = 0) -> ReferenceBatch:
    """Draw a batch of `num_rows` rows, and repeat it.

    Args:
        num_rows: The number of rows to draw.
        repeats: The number of copies of these rows in the batch; only their bytes matter, not their content.
        seed: Equal seeds give equal batches.
    """
    random = np.random.default_rng(seed)
    prompt_lengths = random.integers(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS + 1, num_rows)
    drawn = random.lognormal(LOG_MEAN, LOG_SIGMA, num_rows).astype(np.int64)
    response_lengths = np.clip(drawn, 1, MAX_RESPONSE_TOKENS)
    num_values = int(response_lengths.sum())
    prompt_ids, response_ids = (
        random.integers(0, VOCAB_SIZE, int(lengths.sum())).astype(np.uint16)
        for lengths in (prompt_lengths, response_lengths)
    )
    logprobs = {
        name: jagged(-random.exponential(1.0, num_values).astype(np.float32), response_lengths)
        for name in ("sampler_logprobs", "behavior_logprobs", "reference_logprobs")
    }
    words = _words(random)
    columns = pa.record_batch(
        {
            "prompt_ids": jagged(prompt_ids, prompt_lengths),
            "response_ids": jagged(response_ids, response_lengths),
            "loss_mask": jagged(random.random(num_values) < TRAINED_FRACTION, response_lengths),
            **logprobs,
            "advantages": pa.array(random.standard_normal(num_rows).astype(np.float32)),
            "prompt_text": _texts(words, prompt_ids, prompt_lengths),
            "response_text": _texts(words, response_ids, response_lengths),
        }
    )
    more = jagged(-random.exponential(1.0, num_values).astype(np.float32), response_lengths)
    return ReferenceBatch(
        columns=_repeat(columns, repeats),
        appended=_repeat(pa.record_batch({APPENDED: more}), repeats),
        prompt_lengths=np.tile(prompt_lengths, repeats),
        response_lengths=np.tile(response_lengths, repeats),
    )


def valid_buffers(columns: pa.RecordBatch) -> list[npt.NDArray[np.uint8]]:
    """Return the buffers of the valid data: values without offsets, one bit per bool, text in UTF-8."""
    buffers = []
    for column in columns.columns:
        if pa.types.is_string(column.type):
            first, last = np.frombuffer(column.buffers()[1], np.int32)[[0, len(column)]]
            buffers.append(np.frombuffer(column.buffers()[2], np.uint8)[first:last])
            continue
        values = column.flatten() if is_jagged(column) else column
        assert values.offset == 0, "a column of the reference batch starts inside its buffer"
        num_bytes = (len(values) * values.type.bit_width + 7) // 8
        buffers.append(np.frombuffer(values.buffers()[1], np.uint8)[:num_bytes])
    return buffers


def valid_bytes(columns: pa.RecordBatch) -> int:
    """Return the size of `valid_buffers`: uint16 token ids, float32, one mask bit per token, text, row values."""
    return sum(buffer.size for buffer in valid_buffers(columns))


def pack_columns(columns: pa.RecordBatch) -> Packed:
    """Pack Arrow columns with NumPy alone: the expected result of every path."""
    tokens: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    rows: dict[str, torch.Tensor] = {}
    strings: dict[str, Sequence[Any]] = {}
    for name, column in zip(columns.schema.names, columns.columns, strict=True):
        if is_jagged(column):
            values = np.array(flat_values(column))
            tokens[name] = (torch.from_numpy(_signed(values)), torch.from_numpy(row_lengths(column)))
        elif pa.types.is_string(column.type):
            strings[name] = column.to_pylist()
        else:
            rows[name] = torch.from_numpy(np.array(flat_values(column)))
    return Packed(tokens, rows, strings)


def digests(packed: Packed) -> dict[str, str]:
    """Return one checksum per column, of its values and row lengths, independent of the integer width."""
    parts: dict[str, list[bytes]] = {
        name: [_canonical(values), _canonical(lengths)] for name, (values, lengths) in packed.tokens.items()
    }
    parts |= {name: [_canonical(values)] for name, values in packed.rows.items()}
    for name, column in packed.strings.items():
        strings = column.to_pylist() if isinstance(column, pa.Array) else list(column)
        parts[name] = [repr(strings).encode()]
    return {name: hashlib.blake2b(b"|".join(part), digest_size=16).hexdigest() for name, part in parts.items()}


def _words(random: np.random.Generator) -> npt.NDArray[np.object_]:
    """Return random words, one per token id, about 7 bytes with the space after them; one in a hundred is not ASCII."""
    words = ["".join(LETTERS[random.integers(0, LETTERS.size, size)]) for size in random.integers(3, 10, VOCAB_SIZE)]
    return np.array([f"{word} " for word in words], dtype=object)


def _texts(words: npt.NDArray[np.object_], ids: npt.NDArray[np.uint16], lengths: Ints) -> pa.Array:
    return pa.array(["".join(words[row]) for row in np.split(ids, np.cumsum(lengths)[:-1])])


def _repeat(columns: pa.RecordBatch, repeats: int) -> pa.RecordBatch:
    if repeats == 1:
        return columns
    return pa.Table.from_batches([columns] * repeats).combine_chunks().to_batches()[0]


def _signed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(np.int32) if values.dtype == np.uint16 else values


def _canonical(values: torch.Tensor) -> bytes:
    wide = values if values.is_floating_point() else values.to(torch.int64)
    return wide.contiguous().numpy().tobytes()
