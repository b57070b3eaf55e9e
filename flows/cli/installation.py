"""vLLM's installation: `sluice engine install`."""

import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.placement import Device

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


def install_vllm(console: Console, folder: Path, device: "Device", version: str | None, wheels: Path | None) -> None:
    """Install vLLM into a virtual environment, which is made unless it is there; pip's lines are printed as they come.

    Args:
        console: Gets the line for the config.
        folder: The virtual environment.
        device: What vLLM is to compute on.
        version: vLLM's version; None: the newest that Sluice works with.
        wheels: A folder of wheels to install from, without a network; None: pip's index.

    Raises:
        ConfigError: The folder is not a virtual environment, the version is not one that Sluice works with, or pip
            failed.
    """
    from infra.engines.vllm.installation import NEWEST, OLDEST, PACKAGES, VERSIONS, check_version, find_vllm

    newest = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    wanted = f"=={check_version(version, '--version')}" if version else newest
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise ConfigError(f"{folder} is there and is not a virtual environment; name a new folder")
    if not folder.exists():
        console.print(f"making {folder} with {sys.executable}")
        venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin" / "python"
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *source, PACKAGES[device] + wanted]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        raise ConfigError(
            f"pip could not install {PACKAGES[device]}{wanted} into {folder} (exit code {code}): see its lines above; "
            f"Sluice works with vLLM {VERSIONS}"
        )
    subprocess.run([str(python), "-c", _REMOVE_BROKEN, *COMPANIONS], check=True)
    found = find_vllm(str(python))
    console.print(f"vLLM {found.version} for {found.device} is in {folder}; use it with", highlight=False)
    console.print(f'  rollout.kind = "vllm"\n  rollout.python = "{python}"', markup=False, highlight=False)
