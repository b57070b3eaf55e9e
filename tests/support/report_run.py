"""Runs with all records that a report draws, written by hand."""

from pathlib import Path

import pytest

from infra.storage.runs import write_trace
from schemas.batch import StoreTraffic, StoreUsage
from schemas.step import EvalReport, RunEvent, SourceReport, Span, StepReport
from schemas.summary import LengthHistogram
from schemas.weights import WeightsTransfer
from tests.support import small_run
from tests.support.small_run import make_small_run
from tests.support.tiny import make_tiny_model

ATTACK = "</pre></script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
NUM_STEPS = 12


def step_report(step: int, **changes: object) -> StepReport:
    """A step with every record that a report draws."""
    metrics = {
        "reward": step / 20,
        "reward/p10": 0.0,
        "reward/p90": 1.0,
        "reward_letters": 0.25,
        "reward/failed": 0.0,
        "groups/zero_variance": 0.25,
        "response/tokens": 6.0,
        "response/truncated": 0.1,
        "tokens": 500.0,
        "entropy": 1.0,
        "kl": 0.01,
        "approx_kl": 0.001,
        "clip_fraction": 0.1,
        "grad_norm": 0.5,
        "mismatch/mean": 0.001,
        "mismatch/max": 0.1,
        "mismatch/ess": 0.99,
        f"data/{ATTACK}/share": 0.5,
        f"data/{ATTACK}/success_rate": 0.25,
        "reuse/groups": 2.0,
        "reuse/age": 1.5,
    }
    return StepReport(
        step=step,
        policy_version=step + 1,
        metrics=metrics,
        seconds=3.0,
        seconds_by_phase={"rollout": 2.0, "update": 1.0},
        store=StoreUsage(num_chunks=4, num_rows=6, num_bytes=2**20, peak_bytes=2**21, capacity_bytes=2**30),
        traffic_by_stage={"put": StoreTraffic(num_puts=1, put_bytes=2**20)},
        plan="0123456789abcdef",
        publish=WeightsTransfer(
            transport="shared_memory",
            num_bytes=2**20,
            num_receivers=2,
            write_seconds=0.1,
            read_seconds=0.1,
            load_seconds=0.1,
        ),
        started_at=1000.0 + 4 * step,
        timeline=(Span(name="rollout", start=0.0, seconds=2.0), Span(name="update", start=2.0, seconds=1.0)),
        response_lengths=LengthHistogram(edges=(4, 6, 8), num_rows=(3, 3)),
        telemetry={"step/update_tokens_per_second": 100.0, "memory/policy-0_rss_bytes": 2.0**30, "packing/fill": 0.9},
    ).replace(**changes)


def evaluation(version: int) -> EvalReport:
    sources = tuple(
        SourceReport(
            data_source=name,
            num_prompts=2,
            mean_at_n=0.5,
            best_at_n=0.5,
            maj_at_n=0.5,
            reward=0.5,
            num_failed=0,
            response_tokens=5.0,
            truncated=0.0,
        )
        for name in ("words", ATTACK)
    )
    return EvalReport(
        policy_version=version, num_prompts=4, accuracy=0.5, reward=0.5, num_failed=0, seconds=1.0, sources=sources
    )


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all records, whose data, model and worker attack the page; and one of an earlier version."""
    folder = tmp_path_factory.mktemp("reports")
    make_tiny_model(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run, "PROMPTS", (ATTACK, ATTACK))
        samples = [(*sample[:1], ATTACK, *sample[2:]) for sample in small_run.SAMPLES]
        patch.setattr(small_run, "SAMPLES", samples)
        whole = make_small_run(folder, "whole")
    whole.write_config(whole.config().replace(steps=NUM_STEPS))
    old = make_small_run(folder, "old")
    whole.metrics.append_event(RunEvent(kind="start", step=0, time=1000.0, versions={"torch": "2.13.0"}))
    for step in range(NUM_STEPS):
        whole.metrics.append_step(step_report(step))
    whole.metrics.append_event(RunEvent(kind="restart", step=2, time=1010.0, reason=ATTACK))
    whole.metrics.append_eval(evaluation(0))
    whole.metrics.append_eval(evaluation(NUM_STEPS))
    write_trace(whole, 2, "policy-0", "update", b"")
    absent = {
        "store": None,
        "publish": None,
        "started_at": None,
        "timeline": (),
        "response_lengths": None,
        "telemetry": {},
    }
    old.metrics.append_step(step_report(0, metrics={"reward": 0.5, "tokens": 10.0}, **absent))
    return folder / "runs"
