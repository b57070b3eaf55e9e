"""What `sluice inspect` shows of steps that are damaged, and what it says of those that it can't show."""

import json
import shutil
from pathlib import Path

from infra.storage.runs import RunDirectory
from tests.support.command import Command
from tests.support.small_run import (
    columns_of,
    make_small_run,
    put_rollout,
)
from tests.unit.flows.inspection.results import begin_step, parsed, rejected, shown, stopped


def test_a_damaged_chunk(inspect: Command, run: RunDirectory) -> None:
    path = next((run.path / "columns" / "step-000003").glob("behavior-0-0.*.arrow"))
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 1
    path.write_bytes(damaged)
    out = stopped(inspect("demo"), "ChunkCorruptedError: chunk demo/3/behavior/0/0: the checksum of bytes 0 to 818 is")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "behavior_logprobs behavior response float nat can't be read" in lines
    assert any(line.startswith("can't be read: ChunkCorruptedError: chunk demo/3/behavior/0/0") for line in lines)
    assert "reward rollout row float 5 5 21 0 0 0.6 1" in lines
    assert "means sampler_logprobs -0.125 nat" in lines
    summary = parsed(inspect("demo", "--json"))
    assert [column["name"] for column in summary["columns"] if column["error"]] == ["behavior_logprobs"]
    assert len(summary["errors"]) == 1


def test_a_chunk_of_the_batch_that_is_gone(inspect: Command, run: RunDirectory) -> None:
    for path in (run.path / "columns" / "step-000003").glob("rollout-1-0.*"):
        path.unlink()
    out = stopped(inspect("demo"), "ChunkNotFoundError", "demo/3/rollout/1/0")
    assert out.count("  can't be read") == 12
    assert "19       " in out  # lengths are the batch's own
    assert "advantages 0.25" in out


def test_a_damaged_record_of_a_chunk(inspect: Command, run: RunDirectory) -> None:
    (run.path / "columns" / "step-000003" / "advantage-0-0.json").write_text("{}")
    out = stopped(inspect("demo"), "ChunkCorruptedError: step-000003/advantage-0-0.json")
    assert "demo/3/rollout/1/0" in out


def test_a_damaged_note_of_the_batch(inspect: Command, run: RunDirectory) -> None:
    (run.path / "columns" / "step-000003" / "_batch.json").write_text("{")
    assert not stopped(inspect("demo"), "ChunkCorruptedError: step-000003/_batch.json")
    assert shown(inspect("demo", "2")).startswith("run demo, step 2")


def test_a_plan_of_an_older_version(inspect: Command, run: RunDirectory) -> None:
    (run.path / "plans").mkdir(exist_ok=True)
    (run.path / "plans" / "step-000003.json").write_text('{"updates": [{"ranks": []}]}')
    rejected(inspect("demo"), "plans/step-000003.json is damaged, or of an older version of Sluice")


def test_damage_in_a_put_that_is_not_done(inspect: Command, run: RunDirectory) -> None:
    store = begin_step(run)
    put_rollout(store, 4)
    next((run.path / "columns" / "step-000004").glob("rollout-0-0.*.arrow")).write_bytes(b"nothing")
    out = stopped(inspect("demo"), "ChunkCorruptedError: chunk demo/4/rollout/0/0: 7 bytes are stored")
    assert "3 rows" in out


def test_a_column_that_this_version_does_not_know(inspect: Command, run: RunDirectory) -> None:
    note = run.path / "columns" / "step-000003" / "_batch.json"
    note.write_text(note.read_text().replace('"advantages"', '"teacher"'))
    lines = stopped(inspect("demo"), "'teacher'").splitlines()
    assert "teacher advantage - float can't be read" in [" ".join(line.split()) for line in lines]


def test_a_step_without_columns(inspect: Command) -> None:
    rejected(inspect("demo", "7"), "step 7 of run demo has no columns; steps that have: 2, 3")


def test_a_run_whose_columns_were_all_cleared(inspect: Command, run: RunDirectory) -> None:
    for step in (2, 3):
        columns_of(run).clear(step)
    rejected(inspect("demo"), "run demo has no step with columns", "store.keep_steps = 2")
    rejected(inspect("demo", "3"), "run demo has no step with columns")


def test_a_run_that_has_not_put_anything_yet(inspect: Command, tmp_path: Path) -> None:
    shutil.rmtree(make_small_run(tmp_path, "young").columns)
    rejected(inspect("young"), "run young has no columns yet")
    assert not (tmp_path / "runs/young/columns").exists()


def test_a_run_that_keeps_its_columns_in_memory(inspect: Command) -> None:
    make_small_run(run_id="fleeting", kind="shared", keep_steps=0)
    rejected(inspect("fleeting"), 'store.kind = "shared"', 'store.kind = "tiered" keeps them')


def test_a_url_that_can_not_be_opened(inspect: Command, run: RunDirectory) -> None:
    config = json.loads((run.path / "config.json").read_text())
    config["store"]["url"] = "nowhere://bucket"
    (run.path / "config.json").write_text(json.dumps(config))
    rejected(inspect("demo"), "nowhere://bucket can't be opened", "nowhere")


def test_an_unknown_run(inspect: Command) -> None:
    rejected(inspect("absent"), "no run 'absent'", "demo")
    rejected(inspect("demo", "--runs-dir", "elsewhere"), "no run 'demo'", "elsewhere/ holds no runs")
