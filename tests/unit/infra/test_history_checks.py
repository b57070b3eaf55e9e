"""Saved queries about a finished step."""

from pathlib import Path

import pytest

from infra.history.checks import check_step, load_queries
from infra.storage.runs import RunDirectory
from schemas.errors import ConfigError
from tests.support.small_run import make_small_run

LONG = "select row, num_response_tokens from rows where step = $step and num_response_tokens > 10"
NEGATIVE = "select row from rows where reward < 0"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_small_run(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "long.sql").write_text(LONG)
    (folder / "negative.sql").write_text(NEGATIVE)
    return folder


def test_a_query_that_returns_rows_has_failed(run: RunDirectory, folder: Path) -> None:
    (failed,) = check_step(run, 3, load_queries(str(folder)))
    assert (failed.name, failed.num_rows) == ("long", 1)
    assert str(failed) == 'query long: 1 row, such as {"row": 4, "num_response_tokens": 12}'


def test_only_the_first_rows_are_kept(run: RunDirectory) -> None:
    (failed,) = check_step(run, 3, {"all": "select row from rows where step = $step order by row"})
    assert (failed.num_rows, failed.rows) == (5, ('{"row": 0}', '{"row": 1}', '{"row": 2}'))


def test_a_query_without_an_answer_has_failed(run: RunDirectory) -> None:
    columns = run.path / "columns" / "step-000003"
    next(columns.glob("behavior-0-0.*.arrow")).write_bytes(b"")
    queries = {"damaged": "select behavior_logprobs from rows", "unknown": "select entropies from rows"}
    damaged, unknown = check_step(run, 3, queries)
    assert "chunk demo/3/behavior/0/0" in str(damaged.error)
    assert str(unknown).startswith('query unknown: Binder Error: Referenced column "entropies" not found')


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
