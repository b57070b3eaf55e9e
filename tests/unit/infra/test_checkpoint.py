"""Checkpoints of one process: saved, loaded, described by a manifest, pruned, and on other file systems."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from infra.checkpoints import reading, shards, writing
from infra.checkpoints.state import policy_tensors, restore_policy
from infra.checkpoints.store import CheckpointStore, open_checkpoints
from infra.storage.folder import Folder
from infra.storage.runs import RunDirectory
from schemas.batch import StoreTraffic
from schemas.config.store import CheckpointConfig
from schemas.errors import CheckpointError
from schemas.metrics import Mean
from schemas.step import PolicyHandle, UpdateReport
from tests.support.checkpoint_processes import make_model, train
from tests.support.checkpoint_tensors import (
    SHARD,
    assert_checkpoints_are_kept,
    assert_equal,
    drop_index,
    load,
    newest_version,
    save,
    save_assets,
    tensors_of,
)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "policy"))


def test_a_policy_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    model, optimizer = make_model()
    train(model, optimizer)
    torch.manual_seed(5)
    store.save(3, policy_tensors(model, optimizer), num_updates=2, report=None).wait()
    expected = torch.rand(4)
    new_model, new_optimizer = make_model()
    restore_policy(store, 3, new_model, new_optimizer)
    assert torch.equal(torch.rand(4), expected)
    names = {"optimizer/step/0.weight", "optimizer/exp_avg/0.weight", "optimizer/exp_avg_sq/1.bias", "model/1.bias"}
    assert names < set(store.tensor_names(3))
    old, new = policy_tensors(model, optimizer), policy_tensors(new_model, new_optimizer)
    assert_equal(
        {name: value for name, value in new.items() if name != "rng/torch"},
        {name: value for name, value in old.items() if name != "rng/torch"},
    )
    train(model, optimizer)
    train(new_model, new_optimizer)
    assert torch.equal(model[0].weight, new_model[0].weight)
    assert new_optimizer.param_groups[0]["lr"] == 0.1


def test_starting_weights_have_no_optimizer_state(store: CheckpointStore) -> None:
    model, optimizer = make_model()
    store.save(0, policy_tensors(model, optimizer), num_updates=0, report=None).wait()
    restore_policy(store, 0, model, optimizer)
    assert not optimizer.state


def test_a_checkpoint_of_another_model_is_rejected(store: CheckpointStore) -> None:
    save(store, 1)
    other = {
        "model/a": torch.ones(4, 4),
        "model/b": torch.zeros(5),
        "model/c": torch.zeros(1),
        "rng/torch": torch.zeros(9, dtype=torch.uint8),
    }
    with pytest.raises(CheckpointError) as caught:
        store.load(1, other)
    assert (
        "model/a is [4, 3] torch.float32, expected [4, 4] torch.float32; "
        "model/b is [5] torch.bfloat16, expected [5] torch.float32; model/c is missing" in str(caught.value)
    )
    assert torch.equal(other["model/a"], torch.ones(4, 4))


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.from_regex(r"model/[a-z.]{1,8}", fullmatch=True),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(list(shards.DTYPES.values()))),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 200),
)
def test_any_tensors_come_back_from_files_of_any_size(fields: dict[str, tuple], num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(len(fields))
    tensors = {
        name: torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in fields.items()
    }
    store = CheckpointStore("memory://any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "FILE_BYTES", num_bytes)
        patch.setattr(reading, "READ_BYTES", num_bytes)
        store.save(1, tensors, num_updates=0, report=None).wait()
        loaded = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
        store.load(1, loaded)
    assert newest_version(store) == 1
    assert_equal(loaded, tensors)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_load_reads_one_range_of_each_file_that_it_needs_and_no_header(
    has_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, asked = CheckpointStore(f"memory://asked-{has_index}"), list[tuple[str, int]]()
    tensors = {f"model/{n}": torch.full((2, 3), float(n)) for n in range(8)}  # 24 bytes each
    monkeypatch.setattr(writing, "FILE_BYTES", 100)
    store.save(1, tensors, num_updates=0, report=None).wait()
    if not has_index:
        drop_index(store, 1)
    read, read_ranges = Folder.read, Folder.read_ranges
    monkeypatch.setattr(Folder, "read", lambda folder, name: asked.append((name[12:], 1)) or read(folder, name))
    monkeypatch.setattr(
        Folder,
        "read_ranges",
        lambda folder, name, ranges: asked.append((name[12:], len(ranges))) or read_ranges(folder, name, ranges),
    )
    for names, num_files in ((["model/5", "model/4"], 1), (tensors, 2)):
        loaded = {name: torch.zeros(2, 3) for name in names}
        store.load(1, loaded)
        assert_equal(loaded, {name: tensors[name] for name in names})
        files = ["rank-00000-00001.safetensors", SHARD][:num_files]
        first = [("manifest.json", 1), *([("index.json", 1)] if has_index else [(SHARD, 1), (files[0], 1)] * 2)]
        assert sorted(asked) == sorted([*first, *((file, 1) for file in files)])
        asked.clear()
    monkeypatch.setattr(reading, "RANGE_BYTES", 50)
    store.load(1, {name: torch.zeros(2, 3) for name in tensors})
    assert asked[-1][1] == 2  # of 96 bytes


def test_only_parts_that_overlap_what_a_rank_holds_are_looked_at() -> None:
    def part(row: int, rows: int) -> shards.Part:
        return shards.Part("F32", 100 + row, (row, 0), (rows, 3))

    files = {"b": {"w": part(300, 5)}, "a": {"w": part(0, 300)}, "c": {"w": part(305, 0), "step": part(0, 0)}}
    files["c"]["step"] = shards.Part("F32", 8, (), ())
    index = shards.ShardIndex.model_validate_json(shards.ShardIndex.of(files).model_dump_json())
    tensor = index.tensors["w"]
    assert (tensor.dtype, tensor.size) == ("F32", (305, 3))
    assert reading.parts_within(tensor, (0, 0), (300, 3)) == [[0, 100, 0, 0, 300, 3]]
    assert reading.parts_within(tensor, (299, 0), (6, 3)) == [[0, 100, 0, 0, 300, 3], [1, 400, 300, 0, 5, 3]]
    assert reading.parts_within(tensor, (300, 0), (0, 3)) == []
    assert reading.parts_within(index.tensors["step"], (), ()) == [[2, 8]]


def test_equal_tensors_give_equal_files(tmp_path: Path) -> None:
    expected = tensors_of(1)
    views = {name: tensor.repeat(2, *[1] * (tensor.dim() - 1))[: len(tensor)] if tensor.dim() else tensor
             for name, tensor in reversed(expected.items())}  # fmt: skip
    first, second = (CheckpointStore(str(tmp_path / name)) for name in ("first", "second"))
    first.save(1, expected, num_updates=1, report=None).wait()
    second.save(1, views, num_updates=1, report=None).wait()
    for name in (SHARD, "manifest.json"):
        assert Path(first.path(1), name).read_bytes() == Path(second.path(1), name).read_bytes()


def test_torch_and_safetensors_read_the_shards(store: CheckpointStore) -> None:
    path = save(store, 1)
    assert_equal(load_file(Path(path, SHARD)), tensors_of(1))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(1).items()}
    dcp_load(loaded, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert_equal(loaded, tensors_of(1))


def test_the_manifest_records_what_a_resumed_run_needs(store: CheckpointStore) -> None:
    report = UpdateReport(
        policy=PolicyHandle(run_id="run", version=4, incarnation="x"),
        metrics={"loss": Mean(total=1.5, weight=3)},
        traffic=StoreTraffic(),
    )
    path = store.save(4, tensors_of(4), num_updates=7, report=report, write_assets=save_assets).wait()
    manifest = store.read_manifest(4)
    assert (manifest.version, manifest.num_updates, manifest.num_ranks) == (4, 7, 1)
    assert manifest.report == report
    assert manifest.adapter is None
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in Path(path).rglob("*") if file.is_file()}
    del sizes["manifest.json"]
    assert {name: entry.num_bytes for name, entry in manifest.files.items()} == sizes
    with store.assets(4) as folder:
        assert (folder / "config.json").read_text() == "{}"


def test_tensors_may_change_once_save_returns(store: CheckpointStore) -> None:
    changed = threading.Event()
    tensors = tensors_of(1)
    pending = store.save(1, tensors, num_updates=1, report=None, write_assets=lambda _: changed.wait())
    try:
        for tensor in tensors.values():
            tensor.zero_()
        assert store.complete_versions() == []
    finally:
        changed.set()
    pending.wait()
    assert_equal(load(store, 1), tensors_of(1))


def fail(folder: Path) -> None:
    raise OSError("disk full")


def test_a_failed_save_says_why_and_leaves_the_previous_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    pending = store.save(2, tensors_of(2), num_updates=2, report=None, write_assets=fail)
    with pytest.raises(CheckpointError, match=r"step-000002 can't be written: rank 0: OSError\('disk full'\)"):
        pending.wait()
    assert newest_version(store) == 1
    save(store, 2)
    assert newest_version(store) == 2


def test_a_save_that_failed_before_it_was_planned_is_planned_again(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    more = tensors_of(2) | {"previous/a": torch.ones(2)}
    with monkeypatch.context() as broken:
        broken.setattr(store, "_clear", lambda version: fail_with("no space"))
        failing = store.save(2, more, num_updates=2, report=None)
        with pytest.raises(CheckpointError, match="no space"):
            failing.wait()
    store.save(2, more, num_updates=2, report=None).wait()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in more.items()}
    store.load(2, loaded)
    assert_equal(loaded, more)


def fail_with(reason: str) -> None:
    raise OSError(reason)


def test_a_failure_without_a_waiter_is_raised_by_the_next_save(store: CheckpointStore) -> None:
    store.save(2, tensors_of(2), num_updates=2, report=None, write_assets=fail)
    with pytest.raises(CheckpointError, match="disk full"):
        save(store, 3)
    save(store, 3)


def test_saving_an_older_version_removes_the_newer_ones(store: CheckpointStore) -> None:
    for version in (1, 2, 3, 2):
        save(store, version)
    assert store.complete_versions() == [1, 2]


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for version in range(1, 7):
        save(store, version)
    Path(store.path(3), "manifest.json").unlink()  # left by a kill
    Path(store.path(9)).mkdir()  # being written by another process
    store.retain(6, 2, None, 2)
    assert store.complete_versions() == [2, 5, 6]
    assert [Path(store.path(version)).exists() for version in (3, 9)] == [False, True]
    store.retain(6, 1)
    assert store.complete_versions() == [6]
    with pytest.raises(ValueError, match="at least 1"):
        store.retain(6, 0)


def test_a_save_in_progress_is_left_alone(store: CheckpointStore) -> None:
    save(store, 1)
    Path(save(store, 5), SHARD).unlink()  # damaged, so that the run resumes from 1
    may_finish = threading.Event()
    saved = store.save(2, tensors_of(2), num_updates=2, report=None, write_assets=lambda _: may_finish.wait())
    try:
        assert not saved.is_complete
        store.retain(1, 1)
        assert newest_version(store) == 1
    finally:
        may_finish.set()
    saved.wait()
    assert saved.is_complete
    store.retain(2, 1)
    assert store.complete_versions() == [2]


def test_the_url_of_a_runs_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run-7")
    assert open_checkpoints(directory, CheckpointConfig()).path(12) == str(tmp_path / "run-7/policy/step-000012")
    elsewhere = open_checkpoints(directory, CheckpointConfig(url="memory://bucket/prefix/"))
    assert elsewhere.path(12) == "memory://bucket/prefix/run-7/step-000012"


def test_another_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FILE_BYTES", 40)  # several files
    assert_checkpoints_are_kept("memory://runs/run-7")
