"""Bundles: what is packed comes back, and nothing of a damaged or unsafe one is used."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.replay.bundle import _PLACES, without_programs
from infra.history.bundle_files import FORMAT, MANIFEST, BundleManifest, pack, unpack
from schemas.config.rollout import ProgramRollout, TransformersRollout, VllmRollout
from schemas.config.runtime import RuntimeConfig
from schemas.errors import BundleError

FILES = {"config.json": b"{}", "columns/step-000003/_batch.json": b"batch", "policy/weights.safetensors": b"w" * 5000}

Contents = dict[str, bytes]

ELSEWHERE = {"runs_dir", "shared_memory", "max_restarts", "pool", "tracing", "profile_steps"}  # of the run's machines


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    empty = BundleManifest(format=FORMAT, run_id="demo", step=3, is_redacted=False, versions={"torch": "1"}, files={})
    pack(tmp_path / "folder", tmp_path / "step.bundle", empty)
    return tmp_path / "step.bundle"


def rewrite(bundle: Path, change: Callable[[Contents], object]) -> Path:
    """Write the bundle again, changed in any way."""
    with zipfile.ZipFile(bundle) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    change(contents)
    other = bundle.with_suffix(".other")
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return other


def rewrite_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    def changed(contents: Contents) -> None:
        manifest = json.loads(contents[MANIFEST])
        change(manifest)
        contents[MANIFEST] = json.dumps(manifest).encode()

    return rewrite(bundle, changed)


def refused(bundle: Path, folder: Path) -> str:
    with pytest.raises(BundleError) as raised:
        unpack(bundle, folder)
    return str(raised.value)


def test_what_is_packed_comes_back(bundle: Path, tmp_path: Path) -> None:
    manifest = unpack(bundle, tmp_path / "out")
    assert (manifest.run_id, manifest.step, set(manifest.files)) == ("demo", 3, set(FILES))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES
    with pytest.raises(BundleError, match="exists"):
        pack(tmp_path / "folder", bundle, manifest)
    again = tmp_path / "again.bundle"
    pack(tmp_path / "folder", again, manifest)
    assert again.read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", "a/../../out.txt", "a//b", ".hidden", "a\\b", "a/", ""])
def test_unsafe_names_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    def add(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"]["config.json"]

    other = rewrite(rewrite_manifest(bundle, add), lambda contents: contents.update({f"run/{name}": b"{}"}))
    assert "is not a manifest: files" in refused(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.txt").exists()


def test_files_must_be_those_of_the_manifest(bundle: Path, tmp_path: Path) -> None:
    more = rewrite(bundle, lambda contents: contents.update({"run/more.txt": b"x"}))
    assert "'run/more.txt' is not in its manifest" in refused(more, tmp_path / "out")
    outside = rewrite(bundle, lambda contents: contents.update({"../more.txt": b"x"}))
    assert "'../more.txt' is not in its manifest" in refused(outside, tmp_path / "out")
    fewer = rewrite(bundle, lambda contents: contents.pop("run/config.json"))
    assert "run/config.json is missing" in refused(fewer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sizes_and_sums_are_checked(bundle: Path, tmp_path: Path) -> None:
    larger = rewrite(bundle, lambda contents: contents.update({"run/config.json": b"0" * 10**7}))
    assert "config.json has more than the 2 bytes of its manifest" in refused(larger, tmp_path / "a")
    assert (tmp_path / "a" / "config.json").stat().st_size == 0
    other = rewrite(bundle, lambda contents: contents.update({"run/config.json": b"[]"}))
    assert "config.json is not what its manifest says" in refused(other, tmp_path / "b")


def test_other_formats_and_files_are_refused(bundle: Path, tmp_path: Path) -> None:
    newer = rewrite_manifest(bundle, lambda manifest: manifest.update(format=FORMAT + 1, unknown=True))
    assert f"a bundle of format {FORMAT + 1}" in refused(newer, tmp_path / "out")
    without = rewrite(bundle, lambda contents: contents.pop(MANIFEST))
    assert f"it has no {MANIFEST}" in refused(without, tmp_path / "out")
    text = rewrite(bundle, lambda contents: contents.update({MANIFEST: b"text"}))
    assert "is not a manifest" in refused(text, tmp_path / "out")
    (tmp_path / "text").write_text("text")
    assert "can't be read as a bundle" in refused(tmp_path / "text", tmp_path / "out")
    assert "can't be read as a bundle" in refused(tmp_path / "absent", tmp_path / "out")


def test_a_bundle_names_no_program_to_run() -> None:
    """Who opens one from elsewhere would start it."""
    own = ProgramRollout(program="engine.py", python="venv/bin/python", num_prompts=7, temperature=0.5, stop=("a",))
    assert without_programs(own) == TransformersRollout(num_prompts=7, temperature=0.5, stop=("a",))
    assert without_programs(VllmRollout(python="venv/bin/python", dtype="bfloat16")) == VllmRollout(dtype="bfloat16")


def test_every_key_of_the_runtime_is_in_a_bundle_or_of_the_run_alone() -> None:
    undecided = set(RuntimeConfig.model_fields) ^ {*_PLACES, *ELSEWHERE}
    assert not undecided, f"by it a step is computed: to _PLACES of flows/replay/bundle.py; else ELSEWHERE: {undecided}"
    assert not ELSEWHERE & {*_PLACES}
