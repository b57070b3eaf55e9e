"""The GPU checklist: what it refuses, its budget and report; a check that fails doesn't end the others."""

import io
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.command import run
from benchmarks.gpu import demo, kernels
from benchmarks.gpu.check import MODELS, Check, all_checks
from benchmarks.gpu.passes import Batch, packed_pass, padded_pass
from benchmarks.gpu.results import CheckResult, Settings
from benchmarks.gpu.run import BENCHMARK, Plan, is_passed, markdown, measure, render, run_checks
from benchmarks.models import make_model
from schemas.errors import ConfigError

TWIN, REAL = Settings(device="cpu", peak_tflops=1.0), Settings(device="cuda", peak_tflops=989.0)

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def sigterm_kept() -> Iterator[None]:
    """Give SIGTERM its handler back, in whose place the command has its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_without_a_gpu_it_refuses_in_one_line(
    sigterm_kept: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in ([], "torch finds no CUDA device"), (["--twin", "--checks", "sped"], "'sped' is not one"):
        with pytest.raises(SystemExit) as ended:
            run(BENCHMARK, "sluice bench gpu", "", arguments)
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error


def test_demos_without_vllm_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"rollout\.python '.*/nosuch/python' can't be run: No such file"):
        measure(Plan(rollout_python="nosuch/python"))


def test_a_check_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path: Path) -> None:
    checks = {"speed huge": Check("benchmarks.gpu.speed", 900), "kernels": Check("benchmarks.gpu.kernels", 0.01)}
    report = run_checks(TWIN, checks, tmp_path)
    assert not is_passed(report)
    assert [(check["status"], check["reason"]) for check in report["checks"]] == [
        ("failed", "KeyError: 'speed huge'"),
        ("failed", "it took more than 0.01 s"),
    ]


def test_the_budget_is_25_minutes_less_the_installation() -> None:
    checks = all_checks(REAL)
    assert [name for name in checks if name.startswith("speed")] == [f"speed {name}" for name in MODELS]
    assert sum(check.limit_seconds for check in checks.values()) <= 21 * 60


def test_two_workers_of_their_own_need_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = demo.check(REAL, tmp_path, placement="separate")
    assert (result.status, result.reason) == (
        "skipped",
        "policy and engine need a GPU each, and this machine has 1",
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_kernels_agree_with_their_cpu_counterparts(device: str, tmp_path: Path) -> None:
    result = kernels.check(TWIN.replace(device=device), tmp_path)
    assert (result.status, result.reason, len(result.figures)) == ("passed", "", 13)


def test_the_report_as_a_table_and_as_markdown() -> None:
    passed = CheckResult.of("speed qwen3-4b", {"training MFU": 0.41}, [])
    failed = CheckResult.of(
        "memory", {"update measured / planned": 1.3}, ["update takes 1.30 times | the planned memory"]
    )
    machine = {"gpus": ["NVIDIA H100"], "versions": {"torch": "2.13.0"}}
    checks = [passed.model_dump(), failed.model_dump()]
    report = {"settings": REAL.model_dump(), "machine": machine, "checks": checks, "seconds": 900}
    console = Console(width=140, file=io.StringIO())
    console.print(render(report))
    for text in (console.file.getvalue(), page := markdown(report)):  # type: ignore[attr-defined]
        assert "GPU checklist on 1 x NVIDIA H100" in text
        assert "2 checks in 900 s, 1 failed; MFU is of 989 TFLOP/s; torch 2.13.0" in text
        assert "training MFU: 0.41" in text
    assert (
        "| memory | failed | 0 | update takes 1.30 times \\| the planned memory<br>update measured / planned: 1.3 |"
        in page
    )
    assert "its figures say nothing of a GPU" in markdown({**report, "settings": TWIN.model_dump()})


@pytest.mark.parametrize(("tokens", "fill", "longest"), [(4096, 0.1, 1024), (512, 0.5, 128), (1000, 0.33, 100)])
def test_lengths_have_the_tokens_and_the_fill(tokens: int, fill: float, longest: int) -> None:
    lengths = Batch(tokens, fill, longest, 1024, 64).lengths()
    assert lengths.sum() == tokens
    assert lengths.max() == longest
    assert lengths.min() >= 4
    assert tokens / (len(lengths) * longest) == pytest.approx(fill, rel=0.05)


def test_packed_and_padded_passes_score_every_target() -> None:
    model = make_model("tiny", torch.device("cpu"), torch.float32)
    batch = Batch(1024, 0.1, 128, token_budget=256, chunk_tokens=64)
    packed, padded = packed_pass(batch, model), padded_pass(batch, model)
    assert sum(len(row.input_ids) for row in packed.micro_batches) == 1024
    assert all(len(row.input_ids) <= 256 for row in packed.micro_batches)
    # 80 rows padded to 128 positions, two at a time; three forwards of forty are run.
    assert padded.fraction == pytest.approx(3 / 40)
    for each in (packed, padded):
        each.switch(model)
        with torch.no_grad():
            logprobs = torch.cat([each.score(model, row) for row in each.micro_batches])
        assert len(logprobs) == sum(len(row.targets) for row in each.micro_batches)
        # A random model is near uniform over its 1024 tokens.
        assert float(-logprobs.mean()) == pytest.approx(6.93, rel=0.1)
