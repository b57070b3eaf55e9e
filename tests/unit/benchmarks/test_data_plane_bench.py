"""The data plane's benchmark: its batch and its checksums."""

import pytest
import torch

from benchmarks.data_plane.batch import Packed, digests, pack_columns, reference_batch, valid_bytes


def test_the_reference_batch_is_what_the_figures_are_quoted_for() -> None:
    batch = reference_batch(512)
    batch.columns.validate(full=True)
    num_tokens = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
    assert 255_000 < num_tokens < 270_000
    assert batch.prompt_lengths.min() >= 32
    assert batch.prompt_lengths.max() <= 256
    assert batch.response_lengths.min() >= 1
    assert batch.response_lengths.max() == 2048
    assert 4.5e6 < valid_bytes(batch.columns) < 4.8e6
    assert reference_batch(512).columns.equals(batch.columns)
    assert valid_bytes(reference_batch(512, repeats=3).columns) == pytest.approx(3 * valid_bytes(batch.columns), abs=2)


def test_a_checksum_tells_values_lengths_and_rows_apart() -> None:
    columns = reference_batch(8).columns
    before = digests(pack_columns(columns))
    swapped = digests(pack_columns(columns.take([1, 0, *range(2, 8)])))
    assert all(before[name] != swapped[name] for name in before)
    packed = pack_columns(columns)
    values, lengths = packed.tokens["loss_mask"]
    moved = lengths + torch.tensor([1, -1, 0, 0, 0, 0, 0, 0])
    assert digests(Packed({"loss_mask": (values, moved)}, {}, {}))["loss_mask"] != before["loss_mask"]
