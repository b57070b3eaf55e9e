"""The data plane's benchmark measures every path, and each gives back what was put; no time is asserted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.data_plane import run
from benchmarks.data_plane.batch import Packed, digests, pack_columns, reference_batch, valid_bytes
from benchmarks.data_plane.breakdown import read_breakdown
from infra.stores import base
from schemas.errors import RunError
from tests.support.progress import wait_until

LACKS_EXTRA = any(importlib.util.find_spec(module) is None for module in ("transfer_queue", "matplotlib"))
CHECKOUT = Path(__file__).parents[3]
PATHS = {
    "sluice",
    "transfer_queue",
    "transfer_queue_padded",
    "ray_padded_dict",
    "ray_padded_numpy",
    "ray_padded_lean",
    "arrow_ipc_plasma",
    "memcpy",
}
TIMES = {"put_ms", "read_ms", "permuted_read_ms", "append_ms", "round_trip_ms"}


@pytest.mark.slow
@pytest.mark.skipif(LACKS_EXTRA, reason="needs the extra `bench`")
def test_the_benchmark_measures_and_verifies_every_path(tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.data_plane", "--quick", "--json", "--plot", str(chart)],
        cwd=CHECKOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])

    assert report["batch"]["rows"] == 512
    assert set(report["paths"]) == PATHS
    for name, figures in report["paths"].items():
        assert figures["verified"] is True
        assert figures["bytes"] > 0
        measured = {time for time in TIMES if figures[time] is not None}
        assert measured == ({"put_ms", "append_ms"} if name == "memcpy" else TIMES)
        assert all(figures[time] > 0 for time in measured)
    for ratio in ("ratio_vs_transfer_queue", "ratio_vs_best_padded", "memcpy_fraction_400mb", "read_400mb_ms"):
        assert report[ratio] > 0
    # Bytes don't depend on the machine.
    assert 1 < report["stored_ratio"] < 1.05
    assert report["paths"]["memcpy"]["bytes"] == report["batch"]["valid_bytes"]
    for operation in ("put", "read", "permuted_read"):
        parts = dict(report["breakdown"][operation])
        total = parts.pop("total")
        assert all(0 <= part <= total for part in parts.values())  # medians, which need not add up
    assert {"orchestration_put_ms", "orchestration_read_ms"} <= set(report["breakdown"])
    assert {"cores", "python", "ray", "torch", "pyarrow", "transferqueue"} <= set(report["machine"])
    assert "<svg" in chart.read_text()


def test_the_reference_batch_is_what_the_figures_are_quoted_for() -> None:
    batch = reference_batch(512)
    batch.columns.validate(full=True)
    num_tokens = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
    assert 255_000 < num_tokens < 270_000
    assert batch.prompt_lengths.min() >= 32
    assert batch.prompt_lengths.max() <= 256
    assert batch.response_lengths.min() >= 1
    assert batch.response_lengths.max() == 2048
    assert 4.5e6 < valid_bytes(batch.columns) < 4.8e6
    assert reference_batch(512).columns.equals(batch.columns)
    assert valid_bytes(reference_batch(512, repeats=3).columns) == pytest.approx(3 * valid_bytes(batch.columns), abs=2)


def test_the_parts_of_a_breakdown_add_up_to_its_total() -> None:
    batch = reference_batch(8)
    mask = batch.columns["loss_mask"]
    parts = read_breakdown(lambda: base.check_row_lengths("loss_mask", mask, batch.response_lengths), lambda _: None)
    total = parts.pop("total")
    assert total > parts["check_lengths"] > 0
    assert parts["rest"] > 0
    assert sum(parts.values()) == pytest.approx(total)


def test_a_checksum_tells_values_lengths_and_rows_apart() -> None:
    columns = reference_batch(8).columns
    before = digests(pack_columns(columns))
    swapped = digests(pack_columns(columns.take([1, 0, *range(2, 8)])))
    assert all(before[name] != swapped[name] for name in before)
    packed = pack_columns(columns)
    values, lengths = packed.tokens["loss_mask"]
    moved = lengths + torch.tensor([1, -1, 0, 0, 0, 0, 0, 0])
    assert digests(Packed({"loss_mask": (values, moved)}, {}, {}))["loss_mask"] != before["loss_mask"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "NEEDED", {"surely_not_installed": "SurelyNotInstalled"})
    with pytest.raises(RunError, match=r"need a checkout and the extra `bench`; missing: SurelyNotInstalled"):
        run.measure(run.QUICK)


@pytest.mark.slow
@pytest.mark.skipif(LACKS_EXTRA, reason="needs the extra `bench`")
def test_terminating_the_command_ends_all_that_it_started() -> None:
    command = [sys.executable, "-m", "flows.cli.main", "bench", "data-plane", "--quick"]
    process = psutil.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(
        lambda: process.poll() is not None or any(is_raylet(child) for child in process.children(recursive=True))
    )
    assert process.poll() is None
    started = process.children(recursive=True)
    process.terminate()
    assert process.wait() != 0
    psutil.wait_procs(started)


def is_raylet(process: psutil.Process) -> bool:
    try:
        return process.name() == "raylet"
    except psutil.NoSuchProcess:
        return False
