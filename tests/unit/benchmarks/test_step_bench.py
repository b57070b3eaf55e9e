"""The report of the benchmark of whole steps."""

import io

from rich.console import Console

from benchmarks.step.report import render


def test_the_figures_as_a_table() -> None:
    path = {"tokens_per_s": 900.0, "staleness": 1.0, "steps": 6, "seconds_by_phase": {"update": 1.25}}
    path["data_plane"] = {"share": 0.0123}
    peer = {"version": "1.16.0", "seconds_per_step": 9.0, "generate_seconds": 5.0, "other_seconds": 4.0}
    peer["rows_per_forward"] = 32
    report = {
        "plan": {"threads": 1, "beside": 2},
        "paths": {"synchronous": {**path, "seconds_per_step": 3.0}, "overlapped": {**path, "seconds_per_step": 2.0}},
        "speedup": {"synchronous": 1.5, "overlapped": 1.0},
        "peers": {"trl": peer},
        "speedup_over_peers": {"trl": {"synchronous": 3.0}},
    }
    console = Console(width=100, file=io.StringIO())
    console.print(render(report))
    text = console.file.getvalue()
    assert "medians, 1 threads per worker, beside 2 busy processes" in " ".join(text.split())
    assert "overlapped is 1.50 times as fast as synchronous" in text
    assert "synchronous is 3.00 times as fast as trl" in text
    assert "1.25" in text
    assert "1.2%" in text
