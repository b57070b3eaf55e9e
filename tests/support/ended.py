"""The `sluice` commands that tests have run to their end, of which the marker `command` names those of a test."""

import os
from collections.abc import Sequence

import pytest

_ended = set[tuple[str, str]]()  # each with the test file that ran it


def note_ended(arguments: Sequence[str]) -> None:
    """Note that a command, given by its arguments, has ended well: in the file of the test that runs now."""
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    _ended.update((file, " ".join(arguments[:length])) for length in (1, 2))  # of a group, two words are a command


def require_ended(item: pytest.Item) -> None:
    """Assert that the test, or another one of its file, has run the commands that it is marked with to their end."""
    file = item.nodeid.partition("::")[0]
    named = [name for marker in item.iter_markers("command") for name in marker.args]
    missing = [name for name in named if (file, name) not in _ended]
    assert not missing, f"{item.nodeid} is marked with commands that no test of the file has run to an end: {missing}"
