"""A run directory of version 0.2.0 still opens: listed, asked, compared, reported and exported."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flows.export import export_run
from flows.report.run import write_report
from infra.history.diff import diff_runs
from infra.history.sql import open_runs
from infra.storage.run_list import list_runs
from infra.storage.runs import RunDirectory
from schemas.errors import RunError
from tests.support.stored_run import RUN_ID, unpack_run


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    unpack_run(tmp_path / "runs")
    return RunDirectory.open(RUN_ID, "runs")


def test_it_is_listed(stored: RunDirectory) -> None:
    (status,) = list_runs("runs")
    assert (status.state, status.step, status.steps) == ("finished", 2, 2)


def test_its_reports_and_plans_are_read(stored: RunDirectory) -> None:
    transfers = [report.publish for report in stored.metrics.steps()]
    assert [transfer and transfer.transport for transfer in transfers] == ["shared_memory"] * 2
    kept = json.loads((stored.path / "plans" / "step-000001.json").read_text())
    plan = stored.plans.load(1)
    assert plan is not None
    (update,) = plan.updates
    ((micro,),) = update.ranks
    (stored_update,) = kept["updates"]
    assert list(micro.rows) == stored_update["ranks"][0][0]["rows"] == [0, 1, 2, 3]
    assert (micro.num_tokens, update.num_loss_tokens) == (68, 32)


@pytest.mark.parametrize("ranks", [5, [5], [[5]], [[{"rows": [0]}]]])
def test_a_damaged_plan_of_that_version_is_named(stored: RunDirectory, ranks: object) -> None:
    file = stored.path / "plans" / "step-000001.json"
    plan = json.loads(file.read_text())
    plan["updates"][0]["ranks"] = ranks
    file.write_text(json.dumps(plan))
    with pytest.raises(RunError, match=r"plans/step-000001\.json is damaged"):
        stored.plans.load(1)


def test_its_rows_are_asked_and_compared(stored: RunDirectory) -> None:
    rows = open_runs(RUN_ID).sql("select step, count(*), sum(len(response_ids)) from rows group by step order by step")
    assert rows.fetchall() == [(0, 4, 32), (1, 4, 32)]
    steps = list(diff_runs(stored, stored))
    assert [step.step for step in steps] == [0, 1]
    assert {step.closeness for step in steps} == {"same bits"}


def test_its_report_and_its_weights_are_written(stored: RunDirectory, tmp_path: Path) -> None:
    assert "2 of 2 steps" in Path(write_report(stored)).read_text()
    export_run(stored, tmp_path / "exported")
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[1] == 16
