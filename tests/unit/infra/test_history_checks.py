"""Saved queries about a finished step."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.history import sql
from infra.history.sql import RunQueries, check_step, load_queries
from infra.history.views import SANDBOX
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError, QueryError
from tests.support.small_run import make_small_run

LONG = "select row, num_response_tokens from rows where step = $step and num_response_tokens > 10"
ENDLESS = "select max(a.range * b.range) from range(10000000) a, range(10000000) b"
NEGATIVE = "select row from rows where reward < 0"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_small_run(tmp_path)


def opened(run: RunDirectory) -> RunQueries:
    return RunQueries([run], SANDBOX)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "long.sql").write_text(LONG)
    (folder / "negative.sql").write_text(NEGATIVE)
    return folder


def test_a_query_that_returns_rows_has_failed(run: RunDirectory, folder: Path) -> None:
    (failed,) = check_step(opened(run), 3, load_queries(str(folder)))
    assert (failed.name, failed.num_rows) == ("long", 1)
    assert str(failed) == 'query long: 1 row, such as {"row": 4, "num_response_tokens": 12}'


def test_only_the_first_rows_are_kept(run: RunDirectory) -> None:
    (failed,) = check_step(opened(run), 3, {"all": "select row from rows where step = $step order by row"})
    assert (failed.num_rows, failed.rows) == (5, ('{"row": 0}', '{"row": 1}', '{"row": 2}'))


def test_a_query_without_an_answer_has_failed(run: RunDirectory) -> None:
    columns = run.path / "columns" / "step-000003"
    next(columns.glob("behavior-0-0.*.arrow")).write_bytes(b"")
    queries = {"damaged": "select behavior_logprobs from rows", "unknown": "select entropies from rows"}
    damaged, unknown = check_step(opened(run), 3, queries)
    assert "chunk demo/3/behavior/0/0" in str(damaged.error)
    assert str(unknown).startswith('query unknown: Binder Error: Referenced column "entropies" not found')


def test_queries_that_take_too_long_or_want_more_have_failed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files,) = check_step(opened(run), 3, {"files": "from glob('/etc/*')"})
    assert "disabled by configuration" in str(files.error)
    monkeypatch.setattr(sql, "CHECK_SECONDS", 0.1)
    endless, after = check_step(opened(run), 3, {"long": ENDLESS, "next": "select 1"})
    assert re.fullmatch(r"the query was stopped after 0\.\d+ s", str(endless.error))
    assert after.error == "not asked: the queries before it took 0.1 s"


def test_a_query_ends_if_its_run_is_cancelled(run: RunDirectory) -> None:
    runs = opened(run)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(runs.query, ENDLESS)
        while not asked.done():
            runs.stop()
        with pytest.raises(QueryError, match="stopped"):
            asked.result()
    with pytest.raises(QueryError, match="the queries were stopped"):
        runs.query("select 1")


def test_a_folder_without_usable_queries_is_rejected(folder: Path, tmp_path: Path) -> None:
    assert load_queries(str(folder)) == {"long": LONG, "negative": NEGATIVE}
    with pytest.raises(ConfigError, match=r"approval.queries = '.*none' has no file that ends in .sql"):
        load_queries(str(tmp_path / "none"))
    (folder / "typo.sql").write_text("selct 1")
    with pytest.raises(ConfigError, match=r"approval.queries: .*queries/typo.sql: Parser Error"):
        load_queries(str(folder))
    (folder / "typo.sql").write_text("drop table rows")
    with pytest.raises(ConfigError, match="expected one query, such as a SELECT, got 'drop table rows'"):
        load_queries(str(folder))
