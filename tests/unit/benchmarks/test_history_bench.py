"""The benchmark of past steps answers its questions about small runs; no time is asserted."""

import io
from pathlib import Path

from rich.console import Console

from benchmarks.history import PAGES, QUERIES, measure, render


def test_the_benchmark_asks_and_compares_equal_runs(tmp_path: Path) -> None:
    report = measure(tmp_path, steps=3, tokens=500, rows=32)
    assert report["tokens"] == 3 * 500
    assert report["different_steps"] == 0
    assert set(report["seconds"]) == {*QUERIES, *PAGES, "diff of equal runs"}
    console = Console(width=120, file=io.StringIO())
    console.print(render(report))
    assert "3 steps, 1,500 response tokens" in console.file.getvalue()
