"""What `sluice inspect` shows of a small run's steps, and what it says of those that it can't show."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli import main as cli
from flows.cli.inspect import print_step, shorten
from infra.storage.runs import RunDirectory
from infra.stores.fsspec import FsspecColumnStore
from infra.stores.summary import summarize_step
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from tests.small_run import (
    DTYPES,
    columns_of,
    make_small_run,
    put_advantages,
    put_behavior,
    put_rollout,
    rollout_columns,
)

Sluice = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return make_small_run(Path("runs"))


@pytest.fixture
def inspect(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sluice:
    """Call `sluice inspect` in this process; returns exit code, standard output and standard error."""
    monkeypatch.setattr(cli.errors, "width", 1000)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["sluice", "inspect", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


def shown(result: tuple[int, str, str]) -> str:
    """What a command that succeeded printed; runs of spaces as one."""
    code, out, err = result
    assert (code, err) == (0, "")
    return "\n".join(" ".join(line.split()) for line in out.splitlines())


def parsed(result: tuple[int, str, str]) -> dict[str, Any]:
    value = json.loads(result[1])
    assert isinstance(value, dict)
    return value


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """The command printed nothing, and ended with code 2 and one line that holds all parts."""
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def stopped(result: tuple[int, str, str], *parts: str) -> str:
    """The command ended with code 1 and one line that holds all parts; returns what it printed before."""
    code, out, err = result
    assert (code, err.count("\n")) == (1, 1), err
    assert err.startswith("stopped: ")
    for part in parts:
        assert part in err
    return out


def begin_step(run: RunDirectory, step: int = 4) -> FsspecColumnStore:
    store = columns_of(run)
    store.open_lease(step)
    return store


def test_the_newest_step_in_the_terminal(inspect: Sluice) -> None:
    out = shown(inspect("demo"))
    assert out.startswith(
        "run demo, step 3, policy version 3: 5 rows, selected from 6 that were put\nsteps with columns: 2, 3\n"
    )
    for line in (
        "column stage axis dtype unit rows values bytes nulls min mean max",
        "reward rollout row float 5 5 21 0 0 0.6 1",
        "advantages advantage row float reward 5 5 20 0 -0.5 0 0.5",
        "demo/3/rollout/0/0 3 3,402",
        "19 2 " + "█" * 20,
        "20 3 " + "█" * 30,
        "6 0",
        "12 1 " + "█" * 15,
        "prompt 'Spell bird backward.'",
        "answer 'drib'",
        "response 'dri'",
        "scores reward 0.5, reward_letters 0.75, advantages 0",
        "means sampler_logprobs -0.625, behavior_logprobs -0.875 nat",
        "length 20 + 4 tokens, finish_reason 'stop', group_id 1",
    ):
        assert f"\n{line}\n" in out
    assert "row 0\n" in out
    assert "row 1\n" in out
    assert "row 3\n" in out
    assert out.count("\nrow ") == 3


def test_a_narrow_terminal_shows_the_figures_in_a_line_each(run: RunDirectory) -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, width=80, no_color=True, highlight=False)
    summary, failures = summarize_step(columns_of(run), 3, 3)
    print_step(narrow, summary)
    assert not failures
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "sampler_logprobs 5 28 152 0 -0.75 -0.5446 -0.125" in [" ".join(line.split()) for line in lines]


def test_a_step_and_a_number_of_rows_may_be_named(inspect: Sluice, run: RunDirectory) -> None:
    assert shown(inspect(str(run.path), "2", "--rows", "0")).startswith("run demo, step 2, policy version 2: 5 rows")
    assert "\nrow " not in shown(inspect("demo", "--rows", "0"))
    assert shown(inspect("demo", "--rows", "99")).count("\nrow ") == 5


def test_json_holds_the_same_for_machines(inspect: Sluice) -> None:
    summary = parsed(inspect("demo", "--json", "--rows", "1"))
    columns = {column.pop("name"): column for column in summary.pop("columns")}
    assert list(columns)[:2] == ["prompt_ids", "response_ids"]
    assert columns["advantages"] == {
        "stage": "advantage",
        "group": 2,
        "axis": "row",
        "dtype": "float",
        "unit": "reward",
        "error": None,
        "stats": {
            "num_rows": 5,
            "num_values": 5,
            "num_bytes": 20,
            "num_nulls": 0,
            "num_nonfinite": 0,
            "minimum": -0.5,
            "mean": 0.0,
            "maximum": 0.5,
        },
    }
    assert columns["prompt_ids"]["stats"]["num_values"] == 19 + 19 + 20 + 20 + 20
    # Responses of 4, 3, 5, 4 and 12 tokens, at 1, 2, 4, 5 and 6 eighths each.
    assert columns["sampler_logprobs"]["stats"]["num_values"] == 28
    assert columns["sampler_logprobs"]["stats"]["mean"] == -(4 * 1 + 3 * 2 + 5 * 4 + 4 * 5 + 12 * 6) / 8 / 28
    assert columns["behavior_logprobs"]["stats"]["maximum"] == -1 / 8 - 1 / 4
    assert columns["reward_letters"]["stats"]["num_nulls"] == 1
    assert columns["reward_letters"]["stats"]["mean"] == (1 + 0.5 + 1 + 0.75) / 4
    assert columns["prompt_text"]["stats"]["mean"] is None
    chunks = summary.pop("chunks")
    assert [(chunk["key"], chunk["num_rows"], chunk["in_batch"]) for chunk in chunks] == [
        ("demo/3/rollout/0/0", 3, True),
        ("demo/3/rollout/1/0", 3, True),
        ("demo/3/behavior/0/0", 6, True),
        ("demo/3/advantage/0/0", 5, True),
    ]
    assert summary == {
        "run_id": "demo",
        "step": 3,
        "steps": [2, 3],
        "has_batch": True,
        "policy_version": 3,
        "errors": [],
        "num_rows": 5,
        "num_rows_put": 6,
        "prompt_tokens": {"edges": [19, 20, 21], "num_rows": [2, 3]},
        "response_tokens": {"edges": list(range(3, 14)), "num_rows": [1, 2, 1, 0, 0, 0, 0, 0, 0, 1]},
        "samples": [
            {
                "row": 0,
                "prompt_tokens": 19,
                "response_tokens": 4,
                "group_id": 0,
                "finish_reason": "stop",
                "prompt_text": "Spell cat backward.",
                "response_text": "tac",
                "answer": "tac",
                "advantages": 0.25,
                "reward": 1.0,
                "reward_parts": {"reward_letters": 1.0},
                "mean_logprobs": {"sampler_logprobs": -1 / 8, "behavior_logprobs": -3 / 8},
            }
        ],
    }


def test_a_step_whose_put_has_only_begun(inspect: Sluice, run: RunDirectory) -> None:
    store = begin_step(run)
    assert shown(inspect("demo")).startswith("run demo, step 3,")  # an open lease holds no columns
    put_rollout(store, 4)
    summary = parsed(inspect("demo", "--json"))
    assert (summary["step"], summary["steps"], summary["has_batch"]) == (4, [2, 3, 4], False)
    assert (summary["num_rows"], summary["num_rows_put"]) == (6, 6)
    figures = {column["name"]: column["stats"] for column in summary["columns"]}
    assert figures["reward"]["num_nulls"] == 1
    assert figures["reward"]["mean"] == (1 + 0.5 + 1 + 0.5 + 0) / 5
    assert summary["samples"][1]["response_text"] == "t\x1b[31mc"
    out = shown(inspect("demo", "4"))
    assert "the put of this step is not done" in out
    assert "response 't\\x1b[31mc'" in out  # nothing a model wrote steers the terminal
    assert "scores reward -, reward_letters -, advantages -" in out


def test_of_a_put_the_chunks_that_are_there_are_shown(inspect: Sluice, run: RunDirectory) -> None:
    store = begin_step(run)
    batch = put_rollout(store, 4)
    store.delete([batch.chunks[0]])
    out = shown(inspect("demo"))
    assert out.startswith("run demo, step 4, policy version 4: 3 rows\n")
    assert "reward rollout row float 3 3 12 0 0 0.5 1" in out


def test_a_stage_in_flight(inspect: Sluice, run: RunDirectory) -> None:
    store = begin_step(run)
    batch = put_rollout(store, 4)
    store.save_batch(batch)
    scored = put_behavior(store, batch)
    out = shown(inspect("demo"))
    assert "demo/4/behavior/0/0 6 818 not in the batch" in out
    assert "behavior_logprobs" not in out
    store.save_batch(put_advantages(store, scored))
    assert "not in the batch" not in shown(inspect("demo"))


def test_a_damaged_chunk(inspect: Sluice, run: RunDirectory) -> None:
    path = next((run.columns / "step-000003").glob("behavior-0-0.*.arrow"))
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


def test_a_chunk_of_the_batch_that_is_gone(inspect: Sluice, run: RunDirectory) -> None:
    for path in (run.columns / "step-000003").glob("rollout-1-0.*"):
        path.unlink()
    out = stopped(inspect("demo"), "ChunkNotFoundError", "demo/3/rollout/1/0")
    assert out.count("  can't be read") == 12
    assert "19       " in out  # lengths are the batch's own
    assert "advantages 0.25" in out


def test_a_damaged_record_of_a_chunk(inspect: Sluice, run: RunDirectory) -> None:
    (run.columns / "step-000003" / "advantage-0-0.json").write_text("{}")
    out = stopped(inspect("demo"), "ChunkCorruptedError: step-000003/advantage-0-0.json")
    assert "demo/3/rollout/1/0" in out


def test_a_damaged_note_of_the_batch(inspect: Sluice, run: RunDirectory) -> None:
    (run.columns / "step-000003" / "_batch.json").write_text("{")
    assert not stopped(inspect("demo"), "ChunkCorruptedError: step-000003/_batch.json")
    assert shown(inspect("demo", "2")).startswith("run demo, step 2")


def test_damage_in_a_put_that_is_not_done(inspect: Sluice, run: RunDirectory) -> None:
    store = begin_step(run)
    put_rollout(store, 4)
    next((run.columns / "step-000004").glob("rollout-0-0.*.arrow")).write_bytes(b"nothing")
    out = stopped(inspect("demo"), "ChunkCorruptedError: chunk demo/4/rollout/0/0: 7 bytes are stored")
    assert "3 rows" in out


def test_a_column_that_this_version_does_not_know(inspect: Sluice, run: RunDirectory) -> None:
    note = run.columns / "step-000003" / "_batch.json"
    note.write_text(note.read_text().replace('"advantages"', '"returns"'))
    lines = stopped(inspect("demo"), "'returns'").splitlines()
    assert "returns advantage - float can't be read" in [" ".join(line.split()) for line in lines]


def test_a_step_without_columns(inspect: Sluice) -> None:
    refused(inspect("demo", "7"), "step 7 of run demo has no columns; steps that have: 2, 3")


def test_a_run_whose_columns_were_all_cleared(inspect: Sluice, run: RunDirectory) -> None:
    for step in (2, 3):
        columns_of(run).clear(step)
    refused(inspect("demo"), "run demo has no step with columns", "store.keep_steps = 2")
    refused(inspect("demo", "3"), "run demo has no step with columns")


def test_a_run_that_has_not_put_anything_yet(inspect: Sluice, tmp_path: Path) -> None:
    shutil.rmtree(make_small_run(tmp_path / "runs", "young").columns)
    refused(inspect("young"), "run young has no columns yet")
    assert not (tmp_path / "runs/young/columns").exists()


def test_a_run_that_keeps_its_columns_in_memory(inspect: Sluice) -> None:
    make_small_run(Path("runs"), "fleeting", kind="ray", keep_steps=0)
    refused(inspect("fleeting"), 'store.kind = "ray"', 'store.kind = "tiered" keeps them')


def test_a_url_that_can_not_be_opened(inspect: Sluice, run: RunDirectory) -> None:
    config = json.loads((run.path / "config.json").read_text())
    config["store"]["url"] = "nowhere://bucket"
    (run.path / "config.json").write_text(json.dumps(config))
    refused(inspect("demo"), "nowhere://bucket can't be opened", "nowhere")


def test_an_unknown_run(inspect: Sluice) -> None:
    refused(inspect("absent"), "no run 'absent'", "demo")
    refused(inspect("demo", "--runs-dir", "elsewhere"), "no run 'demo'", "elsewhere/ holds no runs")


def test_it_starts_nothing_and_imports_no_torch(run: RunDirectory) -> None:
    script = """
import sys
from flows.cli import main as cli
sys.argv = ["sluice", "inspect", "demo"]
try:
    cli.main()
finally:
    import ray
    assert not ray.is_initialized()
    assert not {"torch", "transformers", "prefect"} & set(sys.modules)
"""
    before = sorted(path.name for path in run.path.rglob("*"))
    root = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": root}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run demo, step 3")
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_it_explains_itself(inspect: Sluice) -> None:
    out = shown(inspect("--help"))
    assert "Show what a step's columns hold, without Ray" in out
    assert "the newest with columns if not given" in " ".join(out.replace("│", "").split())


def test_long_texts_are_shortened() -> None:
    assert shorten("a\nb", 10) == r"'a\nb'"
    assert shorten("x" * 10, 10) == "'xxxxxxxxxx'"
    assert shorten("a" * 40 + "b" * 20, 30) == "'" + "a" * 20 + "' … 30 more … '" + "b" * 10 + "'"


def test_one_worker_may_put_no_row(inspect: Sluice, run: RunDirectory) -> None:
    store = begin_step(run)
    key = ChunkKey(run_id="demo", step=4, stage="rollout")
    chunk = store.put(key, rollout_columns(4, 0).slice(0, 0))
    store.save_batch(new_batch("demo", 4, 4, [chunk], DTYPES, [], []))
    out = shown(inspect("demo"))
    assert out.startswith("run demo, step 4, policy version 4: 0 rows\n")
    assert "prompt_ids rollout prompt uint16 token id 0 0" in out
