"""Damage that only files can have, and what other tools see in them."""

import json
import os
import pickle
from collections import Counter
from pathlib import Path
from threading import Barrier
from typing import Any

import polars
import pyarrow as pa
import pytest

from infra.storage.folder import Folder
from infra.stores.chunk_files import BLOCK_BYTES, FORMAT
from infra.stores.files import FsspecColumnStore
from rl_core.views import select
from schemas.batch import BatchHandle
from schemas.errors import (
    ChunkCorruptedError,
    ChunkNotFoundError,
    InvalidKeyError,
    RunError,
    StepNotOpenError,
    StoreError,
)
from tests.contracts.backends import COLUMNS, data_file, key, put_batch, rollout_columns

RUN = "files"


@pytest.fixture
def store(tmp_path: Path) -> FsspecColumnStore:
    made = FsspecColumnStore(RUN, str(tmp_path / "columns"))
    made.open(1)
    return made


@pytest.fixture
def batch(store: FsspecColumnStore) -> BatchHandle:
    return put_batch(store, 1, [rollout_columns([2, 30, 3])])


def test_every_flipped_bit_is_detected(store: FsspecColumnStore, batch: BatchHandle) -> None:
    path = data_file(store, batch.chunks[0])
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(
            ChunkCorruptedError,
            match=r"chunk files/1/rollout/0/0: the checksum of bytes \d+ to \d+ is \w+, expected \w+",
        ):
            store.read(batch, ["reward"])
    path.write_bytes(data)
    assert store.read(batch, COLUMNS).num_rows == 3


def test_a_truncated_or_missing_file_is_detected(store: FsspecColumnStore, batch: BatchHandle) -> None:
    path = data_file(store, batch.chunks[0])
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ChunkCorruptedError, match=f"{size - 1} bytes are stored, expected {size}"):
        store.read(batch, ["reward"])
    path.unlink()
    with pytest.raises(ChunkCorruptedError, match=f"0 bytes are stored, expected {size}"):
        store.verify(batch)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"ref": 1}', pickle.dumps({"ref": 1})])
def test_a_damaged_record_is_detected(store: FsspecColumnStore, batch: BatchHandle, content: bytes) -> None:
    record = data_file(store, batch.chunks[0]).parent / "rollout-0-0.json"
    record.write_bytes(content)
    with pytest.raises(ChunkCorruptedError, match=r"rollout-0-0\.json in .* is not a ChunkRecord"):
        store.read(batch, ["reward"])


@pytest.mark.parametrize("name", ["store.json", "step-000001/rollout-0-0.json"])
def test_a_record_of_a_newer_format_is_refused_and_one_without_a_format_is_read(
    store: FsspecColumnStore, batch: BatchHandle, tmp_path: Path, name: str
) -> None:
    record = tmp_path / "columns" / name
    tree = json.loads(record.read_text())
    assert tree.pop("format") == FORMAT
    for older in ({}, {"format": 1}):
        record.write_text(json.dumps({**tree, **older}))
        assert FsspecColumnStore(RUN, str(tmp_path / "columns")).read(batch, COLUMNS).num_rows == 3
    record.write_text(json.dumps({**tree, "format": FORMAT + 1, "new": 0}))
    message = f"{name} in .* has format {FORMAT + 1}, but this Sluice reads only formats up to {FORMAT}: use"
    with pytest.raises(RunError, match=message):  # not a StoreError: its step isn't cleared as a damaged one is
        FsspecColumnStore(RUN, str(tmp_path / "columns")).read(batch, COLUMNS)


def test_a_file_that_holds_a_pickle_is_rejected(store: FsspecColumnStore, batch: BatchHandle) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(store._folder) + "/exploded",)

    path = data_file(store, batch.chunks[0])
    size = path.stat().st_size
    path.write_bytes(pickle.dumps(Bomb()).ljust(size, b"."))
    with pytest.raises(ChunkCorruptedError, match="checksum"):
        store.read(batch, ["reward"])
    assert not list(path.parent.parent.glob("exploded"))


def test_a_writer_that_dies_leaves_nothing_readable(store: FsspecColumnStore, batch: BatchHandle) -> None:
    record = data_file(store, batch.chunks[0]).parent / "rollout-0-0.json"
    committed = record.read_bytes()
    record.unlink()  # killed before its record: the bytes are complete
    with pytest.raises(ChunkNotFoundError):
        store.read(batch, ["reward"])
    data_file_left = next(record.parent.glob("rollout-0-0.*.arrow"))
    os.truncate(data_file_left, 10)  # killed while it wrote the bytes
    assert store.put(key(store, 1), rollout_columns([2, 30, 3])) == batch.chunks[0]
    assert record.read_bytes() == committed
    assert store.read(batch, COLUMNS).equals(rollout_columns([2, 30, 3]))


def test_a_step_cleared_during_a_write_gets_no_chunk(store: FsspecColumnStore, monkeypatch: pytest.MonkeyPatch) -> None:
    other, write = FsspecColumnStore(RUN, str(store._folder)), store._files.write

    def clear_first(*arguments: Any, **options: Any) -> None:
        assert other.clear(1) == 0
        write(*arguments, **options)

    monkeypatch.setattr(store._files, "write", clear_first)
    with pytest.raises(StepNotOpenError, match="step 1 is not open"):
        store.put(key(store, 1), rollout_columns([2]))
    assert store.chunks(1) == []
    assert store.bytes_by_step() == {}


def test_a_second_client_has_the_same_incarnation(store: FsspecColumnStore, batch: BatchHandle) -> None:
    other = FsspecColumnStore(RUN, str(store._folder))
    assert other.incarnation == store.incarnation
    assert other.read(batch, COLUMNS).equals(rollout_columns([2, 30, 3]))


def test_another_runs_folder_is_rejected(store: FsspecColumnStore) -> None:
    with pytest.raises(RunError, match=r"holds the columns of run files, expected other: .* name the directory files"):
        FsspecColumnStore("other", str(store._folder))


def test_a_symlink_out_of_the_folder_is_not_followed(store: FsspecColumnStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "columns" / "step-000002").symlink_to(tmp_path / "elsewhere")
    store.open(2)
    with pytest.raises(InvalidKeyError, match="leads out of"):
        put_batch(store, 2, [rollout_columns([3])])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_record_can_not_point_to_another_file(store: FsspecColumnStore, batch: BatchHandle, tmp_path: Path) -> None:
    (tmp_path / "secret.arrow").write_bytes(data_file(store, batch.chunks[0]).read_bytes())
    record = data_file(store, batch.chunks[0]).parent / "rollout-0-0.json"
    forged = json.loads(record.read_text())
    record.write_text(json.dumps({**forged, "checksum": "x/../../../secret"}))
    with pytest.raises(ChunkCorruptedError, match="the checksums in its record disagree"):
        store.read(batch, ["reward"])


def test_a_remote_read_fetches_only_the_blocks_of_its_rows() -> None:
    store = FsspecColumnStore(RUN, "memory://wire")
    store.open(1)
    columns = rollout_columns([100_000] * 40)  # 8 MB of ids, 0.5 MB of masks, 16 MB of log-probs
    batch = put_batch(store, 1, [columns])
    fetched: list[tuple[int, int]] = []
    read_ranges = store._folder.read_ranges

    def spy(name: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        fetched.extend(ranges)
        return read_ranges(name, ranges)

    store._folder.read_ranges = spy  # type: ignore[method-assign]
    rows = [37, 2, 3]
    result = store.read(select(batch, rows), ["response_ids", "loss_mask", "info"])
    assert result.equals(columns.select(result.schema.names).take(rows))
    assert sum(stop - start for start, stop in fetched) <= 8 * BLOCK_BYTES  # of 24
    assert len(fetched) == len(set(fetched))


def test_the_files_of_many_chunks_are_read_and_removed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = FsspecColumnStore(RUN, "memory://many"), Counter[str]()
    store.open(1)
    refs = put_batch(store, 1, [rollout_columns([2], seed) for seed in range(20)]).chunks
    for name in ("read", "read_existing", "size", "sizes", "remove", "remove_all"):
        own = getattr(Folder, name)
        monkeypatch.setattr(
            Folder, name, lambda *args, own=own, name=name, **named: calls.update([name]) or own(*args, **named)
        )
    assert {record.ref for record in store.records(1)} == {*refs}
    assert calls == {"sizes": 1, "read_existing": 1}
    store.drop_leftovers(1)
    assert calls == {"sizes": 3, "read_existing": 2, "remove_all": 1}
    missing = refs[0].replace(key=refs[0].key.replace("rollout", "behavior"))
    other = refs[2].replace(incarnation="other")
    assert store.delete([missing, *refs[:2], other, refs[0]]) == refs[0].num_bytes + refs[1].num_bytes
    assert calls == {"sizes": 3, "read_existing": 3, "remove_all": 3}
    assert {record.ref for record in store.records(1)} == {*refs[2:]}


def test_the_chunks_of_a_batch_are_verified_at_the_same_time(
    store: FsspecColumnStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, all_begun, opened = put_batch(store, 1, [rollout_columns([2], seed) for seed in range(8)]), Barrier(8), []

    def open_together(*args: Any) -> Any:
        all_begun.wait(60)
        opened.append(args)
        return own(*args)

    own = store._files.open
    monkeypatch.setattr(store._files, "open", open_together)
    store.verify(batch)
    assert len(opened) == 8


def test_a_damaged_block_fails_only_the_reads_that_use_it(store: FsspecColumnStore) -> None:
    columns = rollout_columns([100_000] * 40)
    batch = put_batch(store, 1, [columns])
    path = data_file(store, batch.chunks[0])
    data = bytearray(path.read_bytes())
    data[12 * BLOCK_BYTES] ^= 1  # among the log-probs
    path.write_bytes(data)
    assert store.read(batch, ["response_ids"]).equals(columns.select(["response_ids"]))
    with pytest.raises(ChunkCorruptedError, match=f"checksum of bytes {12 * BLOCK_BYTES} to {13 * BLOCK_BYTES}"):
        store.read(batch, ["sampler_logprobs"])
    with pytest.raises(ChunkCorruptedError):
        store.verify(batch)


def test_a_read_only_client_changes_nothing(store: FsspecColumnStore, batch: BatchHandle, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "columns").rglob("*")}
    reader = FsspecColumnStore(RUN, str(store._folder), read_only=True)
    assert reader.read(batch, COLUMNS).num_rows == 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "columns").rglob("*")} == before
    with pytest.raises(StoreError, match="holds no columns"):
        FsspecColumnStore(RUN, str(tmp_path / "nowhere"), read_only=True)
    assert not (tmp_path / "nowhere").exists()


def test_any_arrow_tool_opens_a_chunk(store: FsspecColumnStore, batch: BatchHandle) -> None:
    path = data_file(store, batch.chunks[0])
    with pa.memory_map(str(path)) as file:
        assert pa.ipc.open_file(file).read_all().to_pylist() == rollout_columns([2, 30, 3]).to_pylist()
    frame = polars.read_ipc(path)
    assert frame["response_ids"].list.len().to_list() == [2, 30, 3]
