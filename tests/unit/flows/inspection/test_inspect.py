"""What `sluice inspect` shows of a small run's steps."""

import io
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from flows.cli import main as cli
from flows.cli.inspect import print_step, shorten
from infra.storage.runs import RunDirectory
from infra.stores.summary import summarize_step
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from tests.support.command import Command
from tests.support.small_run import (
    DTYPES,
    NUM_SHARDS,
    ROWS_PER_SHARD,
    SAMPLES,
    columns_of,
    put_advantages,
    put_behavior,
    put_rollout,
    rollout_columns,
)
from tests.unit.flows.inspection.results import begin_step, parsed, shown


def test_the_newest_step_in_the_terminal(inspect: Command) -> None:
    out = shown(inspect("demo"))
    assert out.startswith(
        "run demo, step 3, policy version 3: 5 rows, selected from 6 that were put\nsteps with columns: 2, 3\n"
    )
    for line in (
        "column stage axis dtype unit rows values bytes nulls min mean max",
        "reward rollout row float 5 5 21 0 0 0.6 1",
        "advantages advantage row float reward 5 5 20 0 -0.5 0 0.5",
        "demo/3/rollout/0/0 3 3,274",
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


def test_the_rows_whose_reward_failed(inspect: Command) -> None:
    out = shown(inspect("demo", "3", "--failed"))
    assert out.startswith("run demo, step 3, policy version 3: 1 rows, selected from 6 that were put\n")
    assert "\nprompt 'Spell cat backward.'\n" in out
    assert "\nscores reward -, reward_letters -, advantages -\n" in out
    assert "\nplan " not in out


def test_why_the_reward_of_a_row_failed(inspect: Command, run: RunDirectory) -> None:
    store = columns_of(run)
    store.open(4)
    for shard in range(NUM_SHARDS):
        columns = rollout_columns(4, shard)
        ids = pa.array([f"4-{shard}-{row}" for row in range(columns.num_rows)])
        store.put(
            ChunkKey(run_id="demo", step=4, stage="rollout", shard=shard), columns.append_column("sample_id", ids)
        )
    assert "\nfailure " not in shown(inspect("demo", "4", "--failed"))  # as in runs of earlier versions
    run.failures.save(4, {f"4-{shard}-{row}": f"no answer of {shard}, {row}" for shard in range(2) for row in range(3)})
    (at,) = (row for row, sample in enumerate(SAMPLES) if sample[3] is None)
    out = shown(inspect("demo", "4", "--failed"))
    assert out.count("\nfailure ") == 1
    assert f"\nfailure no answer of {at // ROWS_PER_SHARD}, {at % ROWS_PER_SHARD}\n" in out
    assert "\nfailure " not in shown(inspect("demo", "4"))
    run.drop_step_files(4)
    assert run.failures.load(4) is None


def test_a_narrow_terminal_shows_the_figures_in_a_line_each(run: RunDirectory) -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, width=80, no_color=True, highlight=False)
    summary, failures = summarize_step(columns_of(run), 3, 3)
    print_step(narrow, summary)
    assert not failures
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "sampler_logprobs 5 28 152 0 -0.75 -0.5446 -0.125" in [" ".join(line.split()) for line in lines]


def test_a_step_and_a_number_of_rows_may_be_named(inspect: Command, run: RunDirectory) -> None:
    assert shown(inspect(str(run.path), "2", "--rows", "0")).startswith("run demo, step 2, policy version 2: 5 rows")
    assert "\nrow " not in shown(inspect("demo", "--rows", "0"))
    assert shown(inspect("demo", "--rows", "99")).count("\nrow ") == 5


def test_json_has_the_statistics_of_every_column(inspect: Command) -> None:
    columns = {column.pop("name"): column for column in parsed(inspect("demo", "--json"))["columns"]}
    assert list(columns)[:4] == ["prompt_ids", "prompt_text", "answer", "response_ids"]
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


def test_json_holds_the_same_for_machines(inspect: Command) -> None:
    summary = parsed(inspect("demo", "--json", "--rows", "1"))
    del summary["columns"]
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
                "failure": None,
                "reward_parts": {"reward_letters": 1.0},
                "mean_logprobs": {"sampler_logprobs": -1 / 8, "behavior_logprobs": -3 / 8},
            }
        ],
    }


def test_a_step_whose_put_has_only_begun(inspect: Command, run: RunDirectory) -> None:
    store = begin_step(run)
    assert shown(inspect("demo")).startswith("run demo, step 3,")  # an open step may hold no columns
    put_rollout(store, 4)
    summary = parsed(inspect("demo", "--json"))
    assert (summary["step"], summary["steps"], summary["has_batch"]) == (4, [2, 3, 4], False)
    assert (summary["num_rows"], summary["num_rows_put"]) == (6, 6)
    figures = {column["name"]: column["stats"] for column in summary["columns"]}
    assert figures["reward"]["num_nulls"] == 1
    assert figures["reward"]["mean"] == (1 + 0.5 + 1 + 0.5 + 0) / 5
    assert summary["samples"][1]["response_text"] == "t\x1b[31mc"
    out = shown(inspect("demo", "4"))
    assert "the put of this step is not finished" in out
    assert "response 't\\x1b[31mc'" in out  # nothing a model wrote steers the terminal
    assert "scores reward -, reward_letters -, advantages -" in out


def test_of_a_put_the_chunks_that_are_there_are_shown(inspect: Command, run: RunDirectory) -> None:
    store = begin_step(run)
    batch = put_rollout(store, 4)
    store.delete([batch.chunks[0]])
    out = shown(inspect("demo"))
    assert out.startswith("run demo, step 4, policy version 4: 3 rows\n")
    assert "reward rollout row float 3 3 12 0 0 0.5 1" in out


def test_a_stage_in_flight(inspect: Command, run: RunDirectory) -> None:
    store = begin_step(run)
    batch = put_rollout(store, 4)
    store.save_batch(batch)
    scored = put_behavior(store, batch)
    out = shown(inspect("demo"))
    assert "demo/4/behavior/0/0 6 818 not in the batch" in out
    assert "behavior_logprobs" not in out
    store.save_batch(put_advantages(store, scored))
    assert "not in the batch" not in shown(inspect("demo"))


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run demo, step 3")
    assert sorted(path.name for path in run.path.rglob("*")) == before


def test_it_explains_itself(inspect: Command) -> None:
    out = shown(inspect("--help"))
    assert "Show a step's columns, without Ray" in out
    assert "default: the newest with columns" in " ".join(out.replace("│", "").split())


def test_long_texts_are_shortened() -> None:
    assert shorten("a\nb", 10) == r"'a\nb'"
    assert shorten("x" * 10, 10) == "'xxxxxxxxxx'"
    assert shorten("a" * 40 + "b" * 20, 30) == "'" + "a" * 20 + "' … 30 more … '" + "b" * 10 + "'"


def test_one_worker_may_put_no_row(inspect: Command, run: RunDirectory) -> None:
    store = begin_step(run)
    key = ChunkKey(run_id="demo", step=4, stage="rollout")
    chunk = store.put(key, rollout_columns(4, 0).slice(0, 0))
    store.save_batch(new_batch("demo", 4, 4, [chunk], DTYPES, [], []))
    out = shown(inspect("demo"))
    assert out.startswith("run demo, step 4, policy version 4: 0 rows\n")
    assert "prompt_ids rollout prompt uint16 token id 0 0" in out
