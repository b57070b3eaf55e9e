"""`sluice sql`, `sluice diff` and `sluice gc` on small runs."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from infra.storage.runs import RunDirectory
from schemas.step import StepReport
from tests.support.command import Command, assert_rejected, make_command
from tests.support.small_run import columns_of, make_small_run
from tests.unit.flows.inspection.results import shown

GAP = "select step, avg(sampler_logprobs - behavior_logprobs) as gap from tokens group by step order by step"


@pytest.fixture
def sluice(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return make_command(monkeypatch, capsys)


def test_a_query_is_answered_in_the_terminal(sluice: Command) -> None:
    out = shown(sluice("sql", "demo", GAP))
    assert "step gap" in out
    assert "2 0.25" in out
    assert "3 0.25" in out
    assert "1 more rows" in shown(sluice("sql", "demo", GAP, "--rows", "1"))
    assert json.loads(sluice("sql", "demo", GAP, "--json").out) == [{"step": 2, "gap": 0.25}, {"step": 3, "gap": 0.25}]
    Path("gap.sql").write_text(GAP)
    assert "2 0.25" in shown(sluice("sql", "demo", "gap.sql"))


def test_a_process_prints_its_answer_and_nothing_else(run: RunDirectory) -> None:
    command = [sys.executable, "-m", "flows.cli.main", "sql", "demo", GAP, "--json"]
    path = {"PYTHONPATH": str(Path(__file__).parents[4])}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | path)
    assert json.loads(printed.stdout)[0] == {"step": 2, "gap": 0.25}
    assert not printed.stderr  # not what libraries print as Python ends, either


def test_control_characters_of_a_model_are_escaped(sluice: Command) -> None:
    out = sluice("sql", "demo", "select 'a\x1b[31m' as text").out
    assert "\x1b[31m" not in out
    assert "a\\x1b[31m" in out


def test_a_result_is_written_as_a_file_or_a_chart(sluice: Command) -> None:
    assert "wrote 2 rows to gap.parquet" in sluice("sql", "demo", GAP, "-o", "gap.parquet").out
    assert pq.read_table("gap.parquet").to_pylist()[0] == {"step": 2, "gap": 0.25}
    sluice("sql", "demo", GAP, "-o", "gap.csv")
    assert Path("gap.csv").read_text() == '"step","gap"\n2,0.25\n3,0.25\n'
    sluice("sql", "demo", GAP, "-o", "gap.json")
    assert json.loads(Path("gap.json").read_text())[1] == {"step": 3, "gap": 0.25}
    by_reason = "select step, finish_reason, count(*) as n from rows group by all order by all"
    assert "wrote 4 rows" in sluice("sql", "demo", by_reason, "-o", "reasons.html").out
    page = Path("reasons.html").read_text()
    assert '"name":"length"' in page
    assert '"name":"stop"' in page
    assert_rejected(sluice("sql", "demo", GAP, "-o", "gap.xlsx"), "gap.xlsx: no such format")
    assert_rejected(sluice("sql", "demo", "select run_id from runs", "-o", "a.html"), "a chart needs numbers")


def test_a_query_that_cannot_be_answered_is_one_line(sluice: Command) -> None:
    assert_rejected(sluice("sql", "demo", "select nothing from rows"), 'column "nothing" not found')
    assert_rejected(sluice("sql", "demo"), "give at least one run and a query")
    assert_rejected(sluice("sql", "other", GAP), "other")
    chunk = next(Path("runs/demo/columns/step-000002").glob("behavior-0-0.*.arrow"))
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    result = sluice("sql", "demo", GAP)
    assert result.exit_code == 1
    assert result.err.startswith("stopped: ChunkCorruptedError: chunk demo/2/behavior/0/0")
    assert result.err.count("\n") == 1


@pytest.mark.command("diff")
def test_the_exit_code_of_a_diff_is_its_answer(sluice: Command) -> None:
    make_small_run(Path(), "other")
    same = sluice("diff", "demo", "other")
    assert (same.exit_code, same.out) == (0, "2 steps compared: same bits\n")
    columns_of(RunDirectory("runs/other")).clear(3)
    chunkless = sluice("diff", "demo", "other", "--json")
    assert json.loads(chunkless.out)["compared"] == 1
    other = RunDirectory("runs/other")
    store = columns_of(other)
    batch = store.load_batch(2)
    assert batch is not None
    store.save_batch(batch.replace(groups=batch.groups[:2]))
    different = sluice("diff", "demo", "other")
    assert different.exit_code == 1
    assert different.out.splitlines()[-2].startswith("1 steps compared: 1 differ, first in step 2, stage behavior")
    assert json.loads(sluice("diff", "demo", "other", "--json").out)["same"] is False


def test_a_diff_says_of_how_many_steps_it_has_compared_columns(sluice: Command, run: RunDirectory) -> None:
    other = make_small_run(Path(), "other")
    for each, step in itertools.product((run, other), range(2)):  # whose columns neither keeps
        report = StepReport(step=step, policy_version=step + 1, metrics={}, seconds=1.0, seconds_by_phase={})
        each.metrics.append_step(report)
    verdict = "4 steps compared: same bits; columns of 2 of them, plans and metrics alone of the others\n"
    assert sluice("diff", "demo", "other").out == verdict
    assert json.loads(sluice("diff", "demo", "other", "--json").out)["with_columns"] == 2
    (other.path / "columns" / "store.json").unlink()
    reason, shown_last = sluice("diff", "demo", "other").out.splitlines()
    assert reason == f"run other has no columns yet: its first step creates {other.columns}"
    assert shown_last == "2 steps compared: same bits; columns of 0 of them, plans and metrics alone of the others"


def test_garbage_is_shown_before_it_is_removed(sluice: Command, run: RunDirectory) -> None:
    planned = sluice("gc", "demo", "--keep-steps", "0", "--dry-run").out
    assert planned == "demo: would remove 0 steps with 0 bytes, and keep 0 with 0 bytes\n"  # as no checkpoint has them
    assert columns_of(run).steps() == [2, 3]
    assert_rejected(sluice("gc", "other"), "other")
