"""Configs that are rejected before anything is started."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from flows.preflight import check_engine, check_start, check_stop_tokens, check_urls
from infra.engines.sizes import cache_bytes_per_sequence, max_model_len
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from infra.stores.open import check_name
from schemas.config.rollout import VllmRollout
from schemas.config.run import RunConfig
from schemas.config.store import FsspecStore, SharedStore, TieredStore
from schemas.errors import ConfigError, RunError
from tests.support.configs import run_config
from tests.support.engine_checks import ENGINE_PYTHON, NEEDS_VLLM
from tests.support.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    make_tiny_model(folder / "model")
    return folder


def config_of(folder: Path, **overrides: object) -> RunConfig:
    """Return the config of a run of the tiny model: 2 layers of 2 key heads of 8 dims, 512 positions, 260 tokens."""
    return run_config(folder, data={"max_prompt_tokens": 100}, **overrides)


def test_a_place_without_a_known_file_system_is_rejected(folder: Path) -> None:
    for store in (SharedStore(), TieredStore(), FsspecStore(url="memory://columns"), TieredStore(url="s3://bucket/a")):
        check_urls(config_of(folder, store=store, checkpoint={"url": "memory://checkpoints"}))
    for key in ("store", "checkpoint"):
        message = rf"{key}\.url = 'nosuch://x' can't be opened: .*nosuch.*sluice-rl\[s3\].*{key}\.url= clears it"
        with pytest.raises(ConfigError, match=message):
            check_urls(config_of(folder, **{key: {"url": "nosuch://x"}}))
        check_urls(config_of(folder, **{key: {"url": ""}}))


def test_a_renamed_run_is_refused_before_it_starts(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    run = RunDirectory.create(config.replace(runtime=config.runtime.replace(runs_dir=str(tmp_path))), "demo")
    FsspecColumnStore("demo", run.columns)
    elsewhere = RunDirectory(shutil.copytree(run.path, tmp_path / "other" / "demo"))
    check_name(elsewhere)
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "demo2"))
    with pytest.raises(RunError, match=r"columns of run demo, expected demo2: .* name the directory demo \(a copy: in"):
        check_start(run.config(), copy)
    assert not list(copy.path.glob("identity.json"))


def test_stop_tokens_that_the_model_lacks_are_rejected(folder: Path) -> None:
    check_stop_tokens(config_of(folder, rollout={"stop_token_ids": [0, 259]}))
    with pytest.raises(ConfigError, match=r"rollout\.stop_token_ids has 260, but the model .* has tokens 0 to 259"):
        check_stop_tokens(config_of(folder, rollout={"stop_token_ids": [3, 260, 999]}))


def test_the_longest_sequence_of_a_run(folder: Path) -> None:
    config = config_of(folder, rollout={"kind": "vllm", "max_response_tokens": 60})
    assert max_model_len(config) == 160
    # 5 blocks of 32 tokens and an empty one; a token has 2 layers x (key, value) x 2 heads x 8 dims = 64 numbers.
    assert cache_bytes_per_sequence(config, torch.float32) == 6 * 32 * 64 * 4
    assert cache_bytes_per_sequence(config, torch.bfloat16) == 6 * 32 * 64 * 2
    config = config_of(folder, rollout={"max_response_tokens": 60}, eval={"max_response_tokens": 70})
    assert max_model_len(config) == 170
    assert max_model_len(config_of(folder, rollout={"max_response_tokens": 600})) == 512  # the model's positions


def test_an_interpreter_without_vllm_is_rejected(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # finds the standard library only
    bare.chmod(0o755)
    rollout = VllmRollout(python=str(bare))
    hint = r"vLLM is not installed in rollout.python .*: run `sluice engine install vllm --cpu` \(or --cuda\)"
    with pytest.raises(ConfigError, match=hint):
        check_engine(config_of(folder, rollout=rollout), rollout)


@NEEDS_VLLM
def test_a_too_small_cache_and_another_device_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def check(num_bytes: int, device: str = "auto") -> None:
        rollout = VllmRollout(python=ENGINE_PYTHON, max_response_tokens=60, cache_bytes=num_bytes)
        check_engine(config_of(folder, rollout=rollout, runtime={"device": device}), rollout)

    check(49152)
    check(49152, "cpu")
    with pytest.raises(
        ConfigError, match=r"rollout\.cache_bytes = 49151 .* one longest sequence, 49152 bytes in float"
    ):
        check(49151)
    with pytest.raises(ConfigError, match=r"runtime\.device = 'cuda', but the installed vLLM is built for CPUs"):
        check(49152, "cuda")
