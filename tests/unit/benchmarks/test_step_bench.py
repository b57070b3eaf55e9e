"""The benchmark of whole steps: its figures of a run, worked out by hand."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from benchmarks import sft
from benchmarks.step import run
from benchmarks.step.run import summarize
from benchmarks.step.workload import QUICK, write_inputs
from benchmarks.step.workspace import DATA, MODEL, Workspace
from schemas.batch import StoreTraffic
from schemas.errors import ConfigError
from schemas.step import StepReport


def step(number: int, started_at: float) -> StepReport:
    metrics = {"tokens": 350.0, "response/tokens": 7.0, "rollout/staleness": 0.0}
    phases = {"rollout": 1.0, "put": 0.25, "update": 0.5}
    return StepReport(
        step=number,
        policy_version=number + 1,
        metrics=metrics,
        seconds=1.75,
        seconds_by_phase=phases,
        started_at=started_at,
        traffic_by_stage={"put": StoreTraffic(num_puts=2, put_seconds=0.035)},
    )


def test_the_figures_of_a_run() -> None:
    # Of the four steps that count, intervals of 2.5, 3 and 3.5 s, of which 1.5 s are work.
    starts = (0.0, 5.0, 7.0, 9.5, 12.5, 16.0)
    figures = summarize([[step(number, start) for number, start in enumerate(starts)]])
    assert figures["overhead_seconds"] == pytest.approx(1.5)
    assert figures["overhead_p95"] == pytest.approx(1.95)
    assert figures["seconds_by_phase"] == {"put": 0.25, "rollout": 1.0, "update": 0.5}
    assert figures["tokens_per_s"] == pytest.approx(200)
    assert figures["store_share"] == pytest.approx(0.02)
    assert figures["put_ms"] == pytest.approx(17.5)
    assert figures["steps"] == 4


@pytest.mark.parametrize("benchmark", [run, sft])
def test_steps_must_be_left_after_the_warm_up(benchmark: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"--steps 2: the first 2 warm up; give at least 3"):
        benchmark.measure(replace(benchmark.QUICK, steps=2))


def test_prompts_have_about_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    workspace, plan = Workspace(tmp_path), replace(QUICK, prompt_tokens=100)
    assert "data.max_prompt_tokens=1024" in write_inputs(workspace, plan)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / MODEL)
    for row in pq.read_table(tmp_path / DATA).to_pylist():
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert 100 <= len(ids) < 130
