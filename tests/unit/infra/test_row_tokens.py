"""What `sluice view` asks of a kept step: its rows as a table, harmless conditions, and tokens with values."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from infra.history.kept_run import KeptRun
from infra.history.row_table import RowQuery, StepTables, read_trend, rows_of_group, select_rows
from infra.history.row_tokens import colorings, read_row_tokens
from infra.history.token_values import json_safe, row_statistics, token_values, value_columns
from infra.history.views import SANDBOX, StepQueries
from infra.storage.runs import RunDirectory
from schemas.errors import ChunkCorruptedError, QueryError, RunError
from tests.support.small_run import (
    ADVANTAGES,
    LOGPROBS,
    SAMPLES,
    TRAINED,
    columns_of,
    make_small_run,
    replace_advantages,
)
from tests.support.view_run import ATTACK, PROMPTS, TURNS, make_view_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_small_run(tmp_path)


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_view_run(tmp_path_factory.mktemp("agents"), steps=1)


def page_of(run: RunDirectory, **query: object) -> dict[str, list]:  # type: ignore[type-arg]
    """Return a page of step 3 by column."""
    kept = KeptRun(run, only=3)
    found = select_rows(kept, 3, StepTables().of(kept, 3), RowQuery.model_validate(query))
    names = [column["name"] for column in found["columns"]]
    return dict(zip(names, map(list, zip(*found["rows"], strict=True)), strict=True)) if found["rows"] else {}


def test_rows_have_their_values_and_statistics_of_their_tokens(run: RunDirectory) -> None:
    page = page_of(run)
    assert page["row"] == [0, 1, 2, 3, 4]
    assert page["advantages"] == list(ADVANTAGES)
    assert page["num_response_tokens"] == [4, 3, 5, 4, 12]
    assert page["gap_mean"] == [-0.25] * 5
    assert page["gap_max"] == [0.25] * 5
    assert page["sampler_logprob_mean"] == [LOGPROBS[row] for row in TRAINED]
    assert page["reward_letters"] == [1.0, 0.5, 1.0, 0.75, None]


def test_rows_are_sorted_filtered_and_paged(run: RunDirectory) -> None:
    assert page_of(run, sort="reward", descending=True)["row"] == [0, 2, 1, 3, 4]
    assert page_of(run, sort="reward_letters")["row"] == [1, 3, 0, 2, 4]  # nulls are last
    assert page_of(run, where="reward > 0.4 and num_response_tokens < 5", limit=2)["row"] == [0, 1]
    assert page_of(run, where="reward > 0.4 and num_response_tokens < 5", limit=2, offset=2)["row"] == [3]
    by_token = "row in (select row from tokens where sampler_logprobs < -0.7)"
    assert page_of(run, where=by_token)["row"] == [4]
    assert page_of(run, where="reward > 5") == {}


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nope > 1", 'column "nope" not found'),
        ("reward >", "Parser Error"),
        ("select * from read_csv('/etc/passwd')", "Parser Error"),
        ("row in (select 1 from read_csv('/etc/passwd'))", "disabled by configuration"),
        ("row in (select 1 from '/etc/passwd')", "does not exist"),
        ("row in (select 1 from glob('/etc/*'))", "disabled by configuration"),
        ("row in (select 1 from kept)", "does not exist"),  # a variable of this process
        ("true) or (false", "Parser Error"),
        ("true; drop view rows", "Parser Error"),
        ("true; copy rows to 'rows.csv'", "Parser Error"),
        ("(insert into rows values (1))", "Parser Error"),
        ("row in (select count(*) from (set enable_external_access = true))", "Parser Error"),
    ],
)
def test_a_condition_that_is_wrong_or_wants_more_is_one_line(run: RunDirectory, where: str, message: str) -> None:
    with pytest.raises(QueryError, match=message) as raised:
        page_of(run, where=where)
    assert "\n" not in str(raised.value)


def test_a_column_to_sort_by_must_exist(run: RunDirectory) -> None:
    with pytest.raises(QueryError, match="no column 'row; drop view rows' to sort by"):
        page_of(run, sort="row; drop view rows")


def test_a_condition_that_takes_too_long_is_stopped() -> None:
    with (
        closing(StepQueries([], {}, SANDBOX, bool)) as queries,
        pytest.raises(QueryError, match=r"stopped after 0\.1 s"),
        queries.errors(timeout_seconds=0.1),
    ):
        queries.connection.execute("select max(a.i * b.i) from range(1000000) a(i), range(1000000) b(i)").fetchall()


def test_a_table_is_made_once_until_its_step_changes(run: RunDirectory) -> None:
    tables = StepTables()
    first = tables.of(KeptRun(run, only=3), 3)
    assert tables.of(KeptRun(run, only=3), 3) is first
    replace_advantages(run, 3, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert tables.of(KeptRun(run, only=3), 3)["advantages"].to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_rows_of_a_group_are_found(run: RunDirectory) -> None:
    kept = KeptRun(run, only=3)
    table = StepTables().of(kept, 3)
    assert rows_of_group(kept, 3, table, 1) == [2, 3, 4]
    with pytest.raises(RunError, match="no group 7"):
        rows_of_group(kept, 3, table, 7)


def test_a_row_has_its_tokens_and_their_values(run: RunDirectory) -> None:
    kept = KeptRun(run, only=3)
    row, other = read_row_tokens(kept, 3, [1, 4], "no tokenizer")
    assert row["response"] == {"num_tokens": 3, "ids": [*b"ta", 256], "token_texts": None}
    assert row["values"]["advantages"] == [ADVANTAGES[1]] * 3
    assert row["values"]["gap"] == [-0.25] * 3
    assert list(row["values"])[:3] == ["advantages", "gap", "sampler_logprobs"]  # the order of the choice
    assert other["columns"]["response_text"] == SAMPLES[5][1]
    assert (row["row"], row["num_rows"], row["turns"], row["no_token_texts"]) == (1, 5, [], "no tokenizer")
    short = read_row_tokens(kept, 3, [4], "no tokenizer", max_tokens=2)[0]
    assert (short["response"]["num_tokens"], len(short["response"]["ids"]), len(short["values"]["gap"])) == (12, 2, 2)
    assert short["prompt"]["ids"] == [*b"d."]  # the end of a prompt
    with pytest.raises(RunError, match="rows 0 to 4, but no row 5"):
        read_row_tokens(kept, 3, [5], "")


def test_trajectories_have_turns_texts_and_a_reference(agents: RunDirectory) -> None:
    kept = KeptRun(agents, only=0)
    row = read_row_tokens(kept, 0, [0], kept.texts)[0]
    assert "".join(row["response"]["token_texts"]) == "".join(said + answer for said, answer in TURNS[0])
    assert "".join(row["prompt"]["token_texts"]) == PROMPTS[0]
    first, second = row["turns"]
    assert "branch" not in first | second
    assert row["tree"].splitlines()[:2] == [
        f"prompt: {row['prompt']['num_tokens']} tokens",
        f"turn 1: {first['tokens']} tokens trained, reward {first['reward']:.4g}",
    ]
    assert read_row_tokens(kept, 0, [1], kept.texts)[0]["turns"][1]["branch"] == "branch at the prompt's end"
    mask = row["values"]["loss_mask"]
    assert mask == [True] * first["tokens"] + [False] * first["environment_tokens"] + [True] * second["tokens"]
    assert row["values"]["advantages"] == pytest.approx(
        [first["advantage"]] * (first["tokens"] + first["environment_tokens"])
        + [second["advantage"]] * second["tokens"]
    )
    assert row["values"]["gap"][3] == row["values"]["behavior_logprobs"][3] == "-Infinity"
    scales = {each["name"]: (each["scale"], each["low"], each["high"]) for each in colorings([row])}
    assert list(scales)[:4] == ["advantages", "gap", "kl", "sampler_logprobs"]
    assert scales["sampler_versions"][0] == "category"
    assert scales["kl"][0] == "signed"
    assert -1 < scales["gap"][1] < 0 < scales["gap"][2] < 1  # of finite values
    assert "entropies" not in scales
    assert read_row_tokens(kept, 0, [1], kept.texts)[0]["columns"]["answer"] == ATTACK


def test_statistics_are_of_trained_tokens() -> None:
    values = {
        "gap": np.array([1.0, -3.0, 9.0, 5.0]),
        "sampler_logprobs": np.array([-1.0, -2.0, -9.0, -5.0]),
        "loss_mask": np.array([True, True, False, False]),
    }
    found = row_statistics(values, np.array([3, 0, 1]))
    assert found["gap_mean"][0] == -1.0
    assert found["gap_max"][0] == 3.0
    assert found["sampler_logprob_mean"][0] == -1.5
    assert np.isnan(found["gap_max"][1:]).all()
    assert "kl_mean" not in found


def test_values_of_other_trainers_are_there_if_their_columns_are() -> None:
    assert value_columns(["entropies", "response_ids", "response_experts", "reward"]) == ["entropies"]
    assert token_values({}, np.array([2])) == {}


def test_numbers_that_json_lacks_are_texts() -> None:
    found = json_safe({"a": [float("nan"), float("inf"), -float("inf"), 1.5], "b": None})
    assert found == {"a": ["NaN", "Infinity", "-Infinity", 1.5], "b": None}


def test_a_step_that_is_not_kept_is_one_line(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="step 7 of run demo has no columns; steps that have: 2, 3"):
        KeptRun(run, only=7).batch(7)


def test_damaged_columns_are_sluices_own_error(run: RunDirectory) -> None:
    chunk = next((run.path / "columns" / "step-000003").glob("behavior-0-0.*.arrow"))
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    with pytest.raises(ChunkCorruptedError):
        page_of(run)


def test_a_trend_has_every_metric_and_the_kept_steps(agents: RunDirectory, run: RunDirectory) -> None:
    found = read_trend(agents)
    assert (found["steps"], found["kept"], found["metrics"]["reward"]) == ([0], [0], [0.2])
    columns_of(run).clear(2)
    assert (read_trend(run)["kept"], read_trend(run)["metrics"]) == ([3], {})
    shared = make_small_run(run.path.parents[1], "shared", kind="shared", keep_steps=0)
    assert "keeps no columns on disk" in read_trend(shared)["not_kept"]
