"""The interpreter of environment processes: the run's own, or that of another virtual environment.

Another one needs neither Sluice nor any other package: the program of its processes is loaded by file and needs the
standard library only (`infra.environments.child`). They find the modules of their own environment, those in the folders
that were added to the run's module path, such as the working directory, and the parts of Sluice that need nothing else.
"""

import os
import platform
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import infra
import rl_core
import schemas
from infra.processes.isolated import variables_of_another
from schemas.errors import ConfigError

OLDEST = (3, 10)
CHECK_SECONDS = 60.0
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter, and where its processes find modules."""

    python: str  # the program
    module_path: Sequence[str | None]  # for `sys.path`; None stands for the interpreter's own folders
    # Folders of Sluice's packages by name, for another interpreter: `rl_core` and `infra`, which are found before
    # others of these names, and `schemas`, which is found after.
    packages: Mapping[str, str]
    variables: Mapping[str, str] | None  # the environment variables; None: the run's

    def check(self) -> None:
        """Check that the program is a Python that runs here, and is new enough.

        Raises:
            ConfigError: It isn't.
        """
        if self.variables is None:
            return
        where = f"environment.python {self.python!r} on {platform.node()}"
        advice = f"set it to the program of a Python of at least {'.'.join(map(str, OLDEST))}, such as venv/bin/python"
        try:
            result = subprocess.run(
                [self.python, "-c", _VERSION],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_SECONDS,
                env=self.variables,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            what = error.strerror if isinstance(error, OSError) else f"no answer within {CHECK_SECONDS:g} s"
            raise ConfigError(f"{where} can't be run: {what}; {advice}") from error
        version = re.fullmatch(r"(\d+)\.(\d+)\n", result.stdout)
        if version is None:
            said = " ".join((result.stderr or result.stdout).split())[-200:] or f"exit code {result.returncode}"
            raise ConfigError(f"{where} is no Python that works: {said}; {advice}")
        if (int(version[1]), int(version[2])) < OLDEST:
            raise ConfigError(f"{where} is Python {version[0].strip()}, which is too old; {advice}")


def find_interpreter(python: str | None) -> Interpreter:
    """Return an interpreter for environment processes.

    Args:
        python: A path, relative to the working directory, or the name of a program on PATH; None: this process's.
    """
    if python is None:
        return Interpreter(sys.executable, [folder or os.getcwd() for folder in sys.path], {}, None)
    packages = {module.__name__: os.path.dirname(str(module.__file__)) for module in (rl_core, infra, schemas)}
    # The folders of PYTHONPATH are on the module path.
    return Interpreter(python, _added_folders(), packages, variables_of_another())


def _added_folders() -> list[str | None]:
    """Return the folders of `sys.path` that aren't this interpreter's own, for which one None stands in their place."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    own = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    roots = tuple(os.path.join(os.path.realpath(folder), "") for folder in own)
    archive = "python{}{}.zip".format(*sys.version_info)
    folders: list[str | None] = []
    for entry in sys.path:
        folder = os.path.realpath(entry)
        if not os.path.join(folder, "").startswith(roots) and os.path.basename(folder) != archive:
            folders.append(os.path.abspath(entry))
        elif None not in folders:
            folders.append(None)
    return folders
