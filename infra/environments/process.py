"""An environment process, from its parent's side."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import infra.environments.child
import infra.environments.child_calls
import infra.environments.child_modules
import infra.environments.child_threads
import infra.processes.lifeline
from infra.environments.child_calls import Mark
from infra.environments.interpreter import Interpreter
from infra.processes.isolated import IsolatedProcess

MODULES = (
    infra.processes.lifeline,
    infra.environments.child_calls,
    infra.environments.child_threads,
    infra.environments.child_modules,
    infra.environments.child,
)
# Loads the modules by their files: no package of Sluice is on the module path of its interpreter. Nor is the current
# folder, which `-P` would not add either, but only in Python 3.11 and later. They are forgotten again, as packages that
# an environment imports would lack them.
PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util, json
names = json.loads(sys.argv[2])
for name, file in names:
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
for name, file in names:
    del sys.modules[name]
module.main(int(sys.argv[1]), int(sys.argv[3]))
"""


class EnvironmentProcess(IsolatedProcess):
    """One process that holds environments.

    Args:
        interpreter: What runs it.
        settings: Its first message; see `infra.environments.child`.
    """

    def __init__(self, interpreter: Interpreter, settings: Mapping[str, Any]) -> None:
        memory = os.memfd_create("mark")
        try:
            os.truncate(memory, Mark.SIZE)
            self.mark = Mark(memory)
            modules = json.dumps([(module.__name__, module.__file__) for module in MODULES])
            command = [interpreter.python, "-c", PROGRAM]
            super().__init__(command, [modules, str(memory)], [memory], interpreter.variables)
        finally:
            os.close(memory)
        self._unsent = b""
        self.is_ready = False
        self.started_at = time.monotonic()
        self.send(settings)

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits until the process receives earlier ones."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or as much of it as the process takes now; `flush` sends the rest."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the process takes it now."""
        with suppress(BlockingIOError):
            while self._unsent:
                try:
                    num_sent = self._connection.send(self._unsent)
                except ConnectionError:  # it has ended, which the next check detects
                    num_sent = len(self._unsent)
                self._unsent = self._unsent[num_sent:]
