"""The sets of versions, and their rows in the page's table; `make versions` itself takes half an hour."""

from pathlib import Path

import pytest

from benchmarks.versions import COLUMNS, PACKAGES, PARTS, ROOT, cells, is_passed, pins, render, replace_row
from schemas.errors import RunError

PAGE = ROOT / "docs" / "installation.md"
ROW = {
    "versions": {"prefect": "3.9.1", "ray": "2.60.0", "torch": "2.14.1", "transformers": "5.22.2"},
    "parts": {"scoring": {"passed": 7, "failed": (), "skipped": 0}},
    "tried": "2026-11-28",
}


def test_a_set_fixes_the_lowest_versions_or_those_of_the_other_packages() -> None:
    *chosen, fastapi = pins("oldest")
    assert fastapi.startswith("fastapi<")
    oldest = dict(pin.split("==") for pin in chosen)
    assert oldest.keys() == set(PACKAGES)
    assert pins("newest") == []  # pip chooses
    assert {pin.split("==")[0] for pin in pins("torch-newest")} == set(PACKAGES) - {"torch"}
    mixed = dict(pin.split("==") for pin in pins("ray-oldest"))
    assert mixed["ray"] == oldest["ray"]
    assert f"torch=={mixed['torch']}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_tests_of_every_part_exist() -> None:
    assert not [path for paths in PARTS.values() for path in paths if not (ROOT / path).exists()]


def test_a_row_takes_the_place_of_the_set_s_last_one() -> None:
    row = cells("torch-newest", ROW)
    assert row == ["`torch-newest`", *ROW["versions"].values(), "–", "7 passed", *["–"] * 4, "2026-11-28"]
    page = replace_row(PAGE.read_text(), row)
    assert f"| {' | '.join(row)} |\n" in page
    assert replace_row(page, row) == page
    assert len(page.splitlines()) == len(PAGE.read_text().splitlines()) + 1
    with pytest.raises(RunError, match=f"the page has no table with the columns {COLUMNS[0]}, prefect"):
        replace_row(Path(__file__).read_text(), row)


def test_one_failed_test_fails_the_command() -> None:
    assert is_passed({"newest": ROW})
    assert not is_passed({"newest": ROW | {"parts": {"runs": {"passed": 7, "failed": ("test",), "skipped": 0}}}})


def test_it_says_why_the_first_test_of_a_part_failed() -> None:
    failed = {"passed": 0, "failed": ("a::b", "a::c"), "skipped": 0, "reason": "ValueError: no"}
    lines = render({"oldest": ROW | {"parts": {"runs": failed}}}).splitlines()
    assert lines[-3:] == ["oldest: a::b", "oldest: a::c", "oldest: runs failed first with: ValueError: no"]
