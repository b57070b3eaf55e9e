"""The data plane's benchmark: its batch, its checksums and its breakdown."""

import pytest
import torch

from benchmarks.data_plane import run
from benchmarks.data_plane.batch import Packed, digests, pack_columns, reference_batch, valid_bytes
from benchmarks.data_plane.breakdown import read_breakdown
from infra.stores import base
from schemas.errors import RunError


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


def test_the_parts_of_a_breakdown_add_up_to_its_total() -> None:
    batch = reference_batch(8)
    mask = batch.columns["loss_mask"]
    parts = read_breakdown(lambda: base.check_row_lengths("loss_mask", mask, batch.response_lengths), lambda _: None)
    total = parts.pop("total")
    assert total > parts["check_lengths"] > 0
    assert parts["rest"] > 0
    assert sum(parts.values()) == pytest.approx(total)


def test_a_checksum_tells_values_lengths_and_rows_apart() -> None:
    columns = reference_batch(8).columns
    before = digests(pack_columns(columns))
    swapped = digests(pack_columns(columns.take([1, 0, *range(2, 8)])))
    assert all(before[name] != swapped[name] for name in before)
    packed = pack_columns(columns)
    values, lengths = packed.tokens["loss_mask"]
    moved = lengths + torch.tensor([1, -1, 0, 0, 0, 0, 0, 0])
    assert digests(Packed({"loss_mask": (values, moved)}, {}, {}))["loss_mask"] != before["loss_mask"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "NEEDED", {"surely_not_installed": "SurelyNotInstalled"})
    with pytest.raises(RunError, match=r"need a checkout and the extra `bench`; missing: SurelyNotInstalled"):
        run.measure(run.QUICK)
