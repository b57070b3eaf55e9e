"""The benchmark of orchestration: its figures of a run, worked out by hand."""

import pytest

from benchmarks.orchestration.run import summarize
from schemas.step import StepReport


def step(number: int, started_at: float, put: float = 0.25) -> StepReport:
    phases = {"rollout": 1.0, "put": put, "update": 0.5}
    seconds = sum(phases.values())
    return StepReport(
        step=number,
        policy_version=number + 1,
        metrics={},
        seconds=seconds,
        seconds_by_phase=phases,
        started_at=started_at,
    )


def test_the_figures_of_a_run() -> None:
    # Intervals of 5, 2, 2.5, 3 and 3.5 s, of which 1.5 s are work; the first step counts only as a stall.
    starts = (0.0, 5.0, 7.0, 9.5, 12.5, 16.0)
    figures = summarize([step(number, start) for number, start in enumerate(starts)])
    assert figures["step_overhead_ms_p50"] == pytest.approx(1250)
    assert figures["p95"] == pytest.approx(1925)
    assert figures["between_steps_ms_p50"] == pytest.approx(1000)
    assert figures["stalls"] == 2
    assert figures["slope_ms_per_100_steps"] == pytest.approx(50_000)
    assert figures["phases_ms_p50"] == {"rollout": 1000, "put": 250, "update": 500}
    assert figures["first_step_ms"]["put"] == 250
    assert figures["steps"] == 4
