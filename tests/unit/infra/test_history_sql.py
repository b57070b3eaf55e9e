"""SQL over the kept steps of small runs."""

import gc
import json
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from infra.history import views
from infra.history.kept_run import KeptRun
from infra.history.sql import RunQueries, open_runs, read_query
from infra.history.views import StepQueries
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.jagged import jagged
from rl_core.planning import plan_step
from rl_core.views import new_batch
from schemas.batch import ChunkKey
from schemas.errors import ChunkCorruptedError, ModelError, QueryError, RunError
from schemas.step import EvalReport, RunEvent, StepReport
from tests.support.small_run import ADVANTAGES, LOGPROBS, SAMPLES, TRAINED, columns_of, make_small_run
from tests.support.tiny import make_tiny_model


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_small_run(tmp_path)


@pytest.fixture
def queries(run: RunDirectory) -> RunQueries:
    return RunQueries([run])


def rows_of(queries: RunQueries, sql: str, **parameters: object) -> list[dict[str, object]]:
    return queries.query(sql, parameters or None).to_pylist()  # type: ignore[no-any-return]


def test_rows_are_those_of_each_kept_steps_batch(queries: RunQueries) -> None:
    found = rows_of(queries, "select * from rows where step = 3 order by row")
    assert [row["response_text"] for row in found] == [SAMPLES[at][1] for at in TRAINED]
    assert [row["advantages"] for row in found] == list(ADVANTAGES)
    assert {(row["run_id"], row["step"]) for row in found} == {("demo", 3)}
    assert [row["row"] for row in found] == [0, 1, 2, 3, 4]
    assert [row["num_response_tokens"] for row in found] == [4, 3, 5, 4, 12]
    assert found[0]["response_ids"] == [*b"tac", 256]
    assert [step["step"] for step in rows_of(queries, "select distinct step from rows order by step")] == [2, 3]


def test_tokens_have_the_values_of_their_row_and_their_own(queries: RunQueries) -> None:
    found = rows_of(queries, "select * exclude (text) from tokens where step = 2 and row = 1 order by position")
    assert [token["response_ids"] for token in found] == [*b"ta", 256]
    assert [token["position"] for token in found] == [0, 1, 2]
    assert {token["advantages"] for token in found} == {ADVANTAGES[1]}
    assert {token["reward"] for token in found} == {0.5}
    assert {token["sampler_logprobs"] for token in found} == {LOGPROBS[1]}
    assert {token["behavior_logprobs"] for token in found} == {LOGPROBS[1] - 0.25}
    gaps = rows_of(queries, "select step, avg(sampler_logprobs - behavior_logprobs) as gap from tokens group by step")
    assert [row["gap"] for row in gaps] == [0.25, 0.25]
    counts = "select (select count(*) from tokens) as r, (select count(*) from prompt_tokens) as p"
    assert rows_of(queries, counts) == [{"r": 2 * 28, "p": 2 * (19 * 2 + 20 * 3)}]


def test_a_query_reads_only_the_steps_and_columns_that_it_needs(
    queries: RunQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, set[str]]] = []
    read = KeptRun.read
    monkeypatch.setattr(KeptRun, "read", lambda *given: reads.append((given[1].step, {*given[2]})) or read(*given))
    assert rows_of(queries, "select max(row) as row from rows where step >= 3 and reward > 0.75") == [{"row": 2}]
    assert reads == [(3, {"reward"})]
    assert len(rows_of(queries, "select sampler_logprobs from tokens where reward = 0.5 and step = 2")) == 3 + 4
    assert reads[1:] == [(2, {"reward"}), (2, {"sampler_logprobs"})]
    reads.clear()
    assert rows_of(queries, "select count(*) as n from tokens where step = $step", step=2) == [{"n": 28}]
    assert reads == []


@pytest.mark.parametrize(
    ("sql", "read"),
    [
        ("select row, avg(sampler_logprobs) as p from tokens group by all order by all", {"sampler_logprobs"}),
        ("select * exclude (text, response_ids) from tokens where step = 3 limit 1", None),
        ("with t as (from tokens) select count(*) from t join t as o using (row, behavior_logprobs)", None),
        ("select T.Reward from tokens as t where t.position in (select position from tokens)", {"reward"}),
    ],
)
def test_columns_of_tokens_are_read_if_a_query_names_them(
    queries: RunQueries, monkeypatch: pytest.MonkeyPatch, sql: str, read: set[str] | None
) -> None:
    """Count the columns that are read; None: all but the excluded ones."""
    reads: set[str] = set()
    own = KeptRun.column
    monkeypatch.setattr(KeptRun, "column", lambda *given: reads.add(given[2]) or own(*given))
    if read is None and "exclude" not in sql:
        with pytest.raises(ModelError):  # the texts, too
            queries.query(sql)
        return
    queries.query(sql)
    assert reads == (read or {"group_id", "reward", "advantages", "loss_mask", "sampler_logprobs", "behavior_logprobs"})


def test_a_column_of_tokens_that_a_query_takes_without_a_name_is_an_error(queries: RunQueries) -> None:
    with pytest.raises(QueryError, match="the query has to name the column response_ids"):
        queries.query("select t from tokens as t")


def test_texts_are_those_of_the_runs_tokenizer(run: RunDirectory, queries: RunQueries, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        queries.query("select text from tokens")
    make_tiny_model(tmp_path / "model")
    texts = rows_of(RunQueries([run]), "select text from tokens where step = 3 and row = 0 order by position")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert [row["text"] for row in texts] == [tokenizer.decode([token]) for token in (*b"tac", 256)]
    assert len({row["text"] for row in texts}) > 1


def test_advantages_of_tokens_are_their_turns(run: RunDirectory) -> None:
    store, batch = columns_of(run), columns_of(run).load_batch(3)
    assert batch is not None
    add_turns(store, run)
    found = rows_of(RunQueries([run]), "select row, list(advantages order by position) as a from tokens group by row")
    assert {row["row"]: row["a"] for row in found} == {0: [1.0, 1.0, 2.0], 1: [3.0, 3.0]}
    counted = rows_of(RunQueries([run]), "select row, num_branches from rows order by row")
    assert [row["num_branches"] for row in counted] == [1, 0]


def add_turns(store: FsspecColumnStore, run: RunDirectory) -> None:
    """Replace the run's steps by one of two trajectories: of two turns, and of one."""
    for step in store.steps():
        store.clear(step)
    store.open(0)
    columns = {
        "prompt_ids": jagged(pa.array([1, 2], pa.int32()).to_numpy(), [1, 1]),
        "response_ids": jagged(pa.array([1, 2, 3, 4, 5], pa.int32()).to_numpy(), [3, 2]),
        "advantages": pa.array([1.0, 3.0], pa.float32()),
        "turn_advantages": jagged(pa.array([1.0, 2.0, 3.0], pa.float32()).to_numpy(), [2, 1]),
        "turn_tokens": jagged(pa.array([1, 1, 2], pa.int32()).to_numpy(), [2, 1]),
        "turn_bridge_tokens": jagged(pa.array([1, 0, 0], pa.int32()).to_numpy(), [2, 1]),
        "turn_parents": jagged(pa.array([-1, -1, -1], pa.int32()).to_numpy(), [2, 1]),
    }
    ref = store.put(ChunkKey(run_id=run.run_id, step=0, stage="rollout"), pa.record_batch(columns))
    dtypes = dict.fromkeys(columns, "int32") | dict.fromkeys(("advantages", "turn_advantages"), "float")
    store.save_batch(new_batch(run.run_id, 0, 0, [ref], dtypes, [1, 1], [3, 2]))


def test_metrics_of_steps_evaluations_and_runs(run: RunDirectory) -> None:
    run.metrics.append_event(RunEvent(kind="start", step=0, time=5.0, versions={"torch": "2.13.0"}))
    for step in (0, 1):
        metrics = {"reward": step / 2, "kl": 0.25}
        run.metrics.append_step(
            StepReport(step=step, policy_version=step + 1, metrics=metrics, seconds=2.0, seconds_by_phase={}, plan="p")
        )
    run.metrics.append_eval(
        EvalReport(policy_version=2, num_prompts=4, accuracy=0.5, reward=0.5, num_failed=0, seconds=1.0, sources=())
    )
    queries = RunQueries([run])
    assert rows_of(queries, "select step, reward, kl, seconds, plan from steps order by step") == [
        {"step": 0, "reward": 0.0, "kl": 0.25, "seconds": 2.0, "plan": "p"},
        {"step": 1, "reward": 0.5, "kl": 0.25, "seconds": 2.0, "plan": "p"},
    ]
    assert rows_of(queries, "select value from metrics where name = 'reward' and step = 1") == [{"value": 0.5}]
    assert rows_of(queries, "select policy_version, accuracy from evals") == [{"policy_version": 2, "accuracy": 0.5}]
    found = rows_of(queries, "select run_id, state, versions, json_extract(config, '$.steps') as n from runs")
    assert found[0]["run_id"] == "demo"
    assert found[0]["state"] == "stopped"
    assert json.loads(str(found[0]["versions"])) == {"torch": "2.13.0"}
    assert int(str(found[0]["n"])) == run.config().steps


def test_placements_are_those_of_the_plan(run: RunDirectory) -> None:
    plan = plan_step([5, 6, 7, 8], [4] * 4, [4] * 4, num_ranks=2, token_budget=12, seed=0, num_updates=2)
    run.plans.save(3, plan)
    found = rows_of(RunQueries([run]), "select step, row, update, rank, micro_batch from placements")
    expected = {
        (row, number, rank, at)
        for number, update in enumerate(plan.updates)
        for rank, micros in enumerate(update.ranks)
        for at, micro in enumerate(micros)
        for row in micro.rows
    }
    assert {(row["row"], row["update"], row["rank"], row["micro_batch"]) for row in found} == expected
    assert len(found) == len(expected)


def test_several_runs_are_told_apart(run: RunDirectory, tmp_path: Path) -> None:
    other = make_small_run(tmp_path, "other")
    both = open_runs(str(run.path), "other", runs_dir=str(tmp_path / "runs"))
    found = both.sql("select run_id, count(*) from rows group by run_id order by run_id").fetchall()
    assert found == [("demo", 10), ("other", 10)]
    assert both.sql("select count(*) from rows where run_id = 'other' and step = 2").fetchall() == [(5,)]
    with pytest.raises(RunError, match="two of the runs have the id demo"):
        RunQueries([run, other, run])


def test_a_query_that_cannot_be_answered(run: RunDirectory, queries: RunQueries, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match='Referenced column "advantage" not found'):
        queries.query("select advantage from rows")
    with pytest.raises(QueryError, match="expected one query"):
        queries.query("create table t (a int)")
    with pytest.raises(QueryError, match=r"none.sql can't be read: No such file"):
        read_query(str(tmp_path / "none.sql"))
    shared = make_small_run(tmp_path, "shared", kind="shared", keep_steps=0)
    with pytest.raises(QueryError, match=r'keeps no columns on disk, because its store.kind = "shared"'):
        RunQueries([shared]).query("select reward from rows")


def test_a_damaged_chunk_is_named(run: RunDirectory, queries: RunQueries) -> None:
    chunk = next(run.path.glob("columns/step-000002/rollout-0-0.*.arrow"))
    chunk.write_bytes(chunk.read_bytes()[:-100] + b"x" * 100)
    with pytest.raises(ChunkCorruptedError, match="chunk demo/2/rollout/0/0"):
        queries.query("select avg(reward) from rows")
    with pytest.raises(QueryError, match="Binder Error"):  # not the one before
        queries.query("select nothing from rows")
    assert rows_of(queries, "select count(*) as n from rows where step = 3 and reward >= 0") == [{"n": 5}]
    with pytest.raises(duckdb.Error, match="chunk demo/2/rollout/0/0"):
        queries.sql("select avg(reward) from rows").fetchall()


def test_the_result_of_a_query_frees_its_connection(run: RunDirectory) -> None:
    def opened() -> list[StepQueries]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, StepQueries)]

    before = opened()  # of other tests in this process
    result = RunQueries([run]).sql("select step, reward from rows order by all limit 1")
    gc.collect()
    assert result.fetchall()[0][0] == 2
    del result
    assert all(any(each is other for other in before) for each in opened())


def test_the_values_of_rows_are_read_by_row(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = views._take
    monkeypatch.setattr(views, "_take", lambda column, rows: taken.append(len(rows)) or take(column, rows))
    assert len(rows_of(RunQueries([run]), "select reward, position from tokens")) == 2 * 28
    assert sum(taken) == 2 * 5


def test_only_what_a_query_names_is_read(run: RunDirectory, queries: RunQueries) -> None:
    metrics = run.path / "metrics.jsonl"
    metrics.write_text('{"kind": "step", "step": 0}\n')  # a damaged line
    steps = "select distinct step from rows order by step"
    assert rows_of(queries, steps) == [{"step": 2}, {"step": 3}]
    for named in ("from steps", "from rows where step in (select step from METRICS)", "describe steps"):
        with pytest.raises(RunError, match="line 1 is damaged"):
            queries.query(named)
    metrics.unlink()
    report = StepReport(step=0, policy_version=1, metrics={"reward": 0.5}, seconds=1.0, seconds_by_phase={})
    for step in range(4):
        run.metrics.append_step(report.replace(step=step))
    newest = RunQueries([run], first=3)
    assert [rows_of(newest, f"select distinct step from {view}") for view in ("rows", "steps", "metrics")] == [
        [{"step": 3}]
    ] * 3
