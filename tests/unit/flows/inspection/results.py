"""The output of `sluice inspect`, parsed."""

import json
from typing import Any

from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from tests.support.command import Result, assert_rejected
from tests.support.small_run import columns_of


def shown(result: Result) -> str:
    """Return what a successful command printed, with runs of spaces as one."""
    code, out, err = result
    assert (code, err) == (0, "")
    return "\n".join(" ".join(line.split()) for line in out.splitlines())


def parsed(result: Result) -> dict[str, Any]:
    value = json.loads(result[1])
    assert isinstance(value, dict)
    return value


def stopped(result: Result, *parts: str) -> str:
    """Assert that a command ended with code 1 and one line that holds all parts; return what it printed before."""
    code, out, err = result
    assert (code, err.count("\n")) == (1, 1), err
    assert err.startswith("stopped: ")
    for part in parts:
        assert part in err
    return out


def begin_step(run: RunDirectory, step: int = 4) -> FsspecColumnStore:
    store = columns_of(run)
    store.open(step)
    return store


def rejected(result: Result, *parts: str) -> None:
    """Assert that a command printed nothing but one line of error that holds all parts."""
    assert result.out == ""
    assert_rejected(result, *parts)
