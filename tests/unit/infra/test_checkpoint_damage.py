"""Damaged, unfinished and foreign files are skipped or rejected, and named."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest

from infra.checkpoints.store import CheckpointStore
from infra.workers.policy import PolicyCheckpoints
from schemas.errors import CheckpointError
from tests.support.checkpoint_tensors import SHARD, drop_index, newest_version, save, save_assets, tensors_of
from tests.support.configs import run_config
from tests.support.tiny import make_tiny_model


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "policy"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest", "broken manifest"])
@pytest.mark.parametrize("name", [SHARD, "hf/config.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_says_why(
    store: CheckpointStore, damage: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    path = Path(save(store, 2, write_assets=save_assets))
    file = path / ("manifest.json" if "manifest" in damage else name)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage in ("remove", "no manifest"):
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    with caplog.at_level(logging.WARNING):
        assert newest_version(store) == 1
    reason = {"flip": "is damaged", "truncate": "bytes, expected", "remove": "is missing"}
    assert f"{file} {reason.get(damage, 'is missing: the checkpoint' if damage[0] == 'n' else 'is not a')}" in _tidy(
        caplog.text
    )
    with pytest.raises(CheckpointError, match=r"step-000002/"):
        store.verify(2)


def test_a_damaged_newest_checkpoint_does_not_count_for_the_policy_that_loaded_the_one_before(
    store: CheckpointStore, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model")
    config = run_config(tmp_path, checkpoint={"keep_last": 1, "keep_best": False})
    for version in (1, 2, 3):
        save(store, version)
    Path(store.path(3), SHARD).write_bytes(b"damage")
    policy = PolicyCheckpoints(config, store, 0, None, None)
    assert policy.retain([]) is None  # it has loaded none yet
    found = policy.find_newest()
    assert found is not None
    assert found[0] == policy.retain([]) == 2  # so that no step after it is swept
    assert store.complete_versions() == [2, 3]
    policy.save(3, tensors_of(3), num_updates=3, report=None)
    policy.finish_saving()
    assert policy.retain([]) == 3
    assert store.complete_versions() == [newest_version(store)] == [3]


def test_each_file_is_checked_by_one_of_several_processes(store: CheckpointStore) -> None:
    path = Path(save(store, 1, write_assets=save_assets))
    names = list(store.read_manifest(1).files)
    for at, name in enumerate(names):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for part in range(2):
            with pytest.raises(CheckpointError, match=f"{name} is damaged") if at % 2 == part else nullcontext():
                store.verify(1, part, 2)
        (path / name).write_bytes(content)
    assert len(names) > 1


def _tidy(text: str) -> str:
    """Remove the sizes of files."""
    return " ".join(word for word in text.split() if word not in ("has",) and not word.isdigit())


def test_a_manifest_that_names_files_elsewhere_is_rejected(store: CheckpointStore) -> None:
    manifest = Path(save(store, 1), "manifest.json")
    content = json.loads(manifest.read_text())
    for name in ("../../secret", "/etc/passwd", "hf/.hidden"):
        manifest.write_text(json.dumps(content | {"files": {name: {"num_bytes": 1, "checksum": ""}}}))
        with pytest.raises(CheckpointError, match="is not a manifest"):
            store.read_manifest(1)


def test_a_file_that_is_not_a_shard_is_named(store: CheckpointStore) -> None:
    shard = Path(save(store, 1), SHARD)
    drop_index(store, 1)
    for content in (b"\xff" * shard.stat().st_size, b"\x02" + bytes(7) + b"{}" + bytes(shard.stat().st_size - 10)):
        shard.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{SHARD} is not a shard"):
            store.tensor_names(1)


def test_a_file_that_disappears_while_it_is_read_is_named(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Path(save(store, 1), SHARD)
    monkeypatch.setattr(CheckpointStore, "_check_sizes", lambda *_: shard.unlink(missing_ok=True))  # as `retain` may
    with pytest.raises(CheckpointError, match=f"{SHARD} can't be read"):
        store.verify(1)


def test_config_and_tokenizer_files_are_checked(store: CheckpointStore) -> None:
    save(store, 1)
    with pytest.raises(CheckpointError, match="written without config and tokenizer files"), store.assets(1):
        pass
    Path(save(store, 2, write_assets=save_assets), "hf/config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf/config\.json is missing or damaged"), store.assets(2):
        pass


def test_a_folder_without_checkpoints(store: CheckpointStore) -> None:
    assert store.newest() is None
    assert store.complete_versions() == []
    store.retain(1, 1)
    with pytest.raises(CheckpointError, match="never finished"):
        store.read_manifest(1)
