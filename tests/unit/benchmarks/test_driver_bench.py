"""The report of the driver's benchmark."""

import io

from rich.console import Console

from benchmarks.driver.report import render


def test_the_figures_as_a_table() -> None:
    part = {"cpu_seconds": 0.25, "wall_seconds": 0.5}
    report = {"ranks": 8, "rows": 1000, "parts": {"score": part}, "driver_seconds": 0.25}
    report |= {"wall_seconds": 0.5, "peak_bytes": 2**29, "calls": 1200, "argument_bytes": 2**20}
    console = Console(width=120, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "1,000 rows and 8 ranks" in text
    assert "250" in text
    assert "0.25 s of processor time, 0.50 s of wall-clock time, 0.50 GiB" in text
    assert "1,200 calls of workers with 1.0 MiB of arguments" in text
