"""Several `sluice` commands in one process, one after another: most of a command's time goes into its imports."""

import json
from collections.abc import Sequence

from tests.support.ended import note_ended
from tests.support.workplace import Command, Workplace

COMMANDS = """
import json, os, sys
from flows.cli import main

os.dup2(1, 2)
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["sluice", *arguments]
    try:
        main.main()
    except SystemExit as ended:
        print(f"\\nexit {ended.code or 0}", flush=True)
"""


def sluice_in_turn(place: Workplace, *commands: Sequence[str]) -> list[tuple[int, str]]:
    """Run `sluice` commands in one process of a workplace; return each one's exit code and what it printed."""
    printed = Command(place, "-P", "-c", COMMANDS, json.dumps(commands)).finish()
    ended: list[tuple[int, str]] = []
    lines: list[str] = []
    for line in printed.splitlines():
        if line.startswith("exit "):
            ended.append((int(line.removeprefix("exit ")), "\n".join(lines)))
            lines = []
        else:
            lines.append(line)
    assert len(ended) == len(commands), printed
    for arguments, (exit_code, _) in zip(commands, ended, strict=True):
        if not exit_code:
            note_ended(arguments)
    return ended
