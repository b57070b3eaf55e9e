"""Each command of `sluice` is run to its end by a test of `make test`, which is marked with it.

`tests/support/ended.py` fails a marked test that hasn't run its commands.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli.main import app
from tests.support.ended import note_ended, require_ended

TESTS = Path(__file__).parents[2]
MARKER = "pytest.mark.command"
LEFT_OUT = (
    "extended",
    "skip",
    "NEEDS",
)  # parts of the markers of tests that `make test` doesn't run, or not everywhere


def commands_of(command: Any, name: str = "") -> list[str]:
    """Return the names of a command line's commands; of a group, those of its commands, after its own."""
    if not (inner := getattr(command, "commands", {})):
        return [name]
    return [each for part, found in inner.items() for each in commands_of(found, f"{name} {part}".strip())]


def commands_in(source: str) -> Iterator[str]:
    """Yield the commands that the tests of a file are marked with, but for those that are left out of `make test`."""
    statements = ast.parse(source).body
    assigned = [statement for statement in statements if isinstance(statement, ast.Assign)]
    if any(ast.unparse(each.targets[0]) == "pytestmark" and is_left_out(each.value) for each in assigned):
        return
    for test in statements:
        if isinstance(test, ast.FunctionDef) and not any(map(is_left_out, test.decorator_list)):
            for marker in test.decorator_list:
                if isinstance(marker, ast.Call) and ast.unparse(marker.func) == MARKER:
                    yield from map(ast.literal_eval, marker.args)


def is_left_out(marker: ast.expr) -> bool:
    return any(part in ast.unparse(marker) for part in LEFT_OUT)


@cache
def marked() -> set[str]:
    sources = (path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    return {command for source in sources if MARKER in source for command in commands_in(source)}


COMMANDS = commands_of(typer.main.get_command(app))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_whole_run(command: str) -> None:
    assert command in marked(), (
        f'no test of `make test` runs `sluice {command}` to its end: add one, marked {MARKER}("{command}")'
    )


def test_markers_name_commands() -> None:
    assert marked() <= set(COMMANDS)


def test_a_marker_without_a_run_is_a_failure(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.command("a group's"))
    note_ended(["a"])
    with pytest.raises(AssertionError, match='has run to an end: \\["a group\'s"\\]'):
        require_ended(request.node)
    note_ended(["a", "group's", "--option"])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@{}('a', 'b c')\ndef test(): pass", ["a", "b c"]),
        ("@{}('a')\n@pytest.mark.extended\ndef test(): pass", []),
        ("@{}('a')\n@NEEDS\n@pytest.mark.skipif(True)\ndef test(): pass", []),
        ("pytestmark = [pytest.mark.extended, NEEDS]\n@{}('a')\ndef test(): pass", []),
    ],
)
def test_tests_that_make_test_leaves_out_do_not_count(source: str, expected: list[str]) -> None:
    assert list(commands_in(source.format(MARKER))) == expected
