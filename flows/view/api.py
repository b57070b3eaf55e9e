"""The JSON that the page of `sluice view` asks for. Every path is answered by a GET request; nothing is changed.

    /api/runs                                     {"runs": [trend of each run], "metrics": {name: {unit, meaning}}}
    /api/rows?run=&step=&where=&sort=&descending=1&offset=&limit=      a page of a step's rows
    /api/row?run=&step=&row=                      {"rows": [one row with its tokens], "colorings": [...], "runs": [ids]}
    /api/group?run=&step=&group=&offset=          the same for the samples of one prompt, and "num_found"

`infra.history.row_table` and `row_tokens` say what is in them. An error is `{"error": one line}`, with status
400 for a wrong parameter or condition, 404 for what there isn't, and 500 for damaged columns. Numbers that are not
finite are the texts `NaN`, `Infinity` and `-Infinity`. Steps and rows are counted from 0.
"""

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from infra.history.kept_run import KeptRun, TokenTexts
from infra.history.row_table import RowQuery, StepTables, metric_facts, read_trend, rows_of_group, select_rows
from infra.history.row_tokens import colorings, read_row_tokens
from infra.storage.runs import RunDirectory
from schemas.errors import ModelError, PipelineError, QueryError, RunError

GROUP_ROWS = 16  # samples of a prompt in one answer
GROUP_TOKENS = 2000  # of each of them

Parameters = Mapping[str, str]


class ViewApi:
    """Answers the page's questions about one run or two.

    Raises:
        RunError: Two have the same id.
    """

    def __init__(self, directories: Sequence[RunDirectory]) -> None:
        self._directories = {directory.run_id: directory for directory in directories}
        if len(self._directories) < len(directories):
            raise RunError(f"two of the runs have the id {directories[0].run_id}; look at one of them only")
        self._tables = StepTables()
        self._texts: dict[str, TokenTexts | str] = {}  # by run; or why it has none
        self._answers: dict[str, Callable[[Parameters], dict[str, Any]]] = {
            "/api/runs": self._runs,
            "/api/rows": self._rows,
            "/api/row": self._row,
            "/api/group": self._group,
        }

    def answer(self, path: str, parameters: Parameters) -> tuple[HTTPStatus, dict[str, Any]]:
        """Return the status and the JSON value of a path."""
        if path not in self._answers:
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {path}"}
        try:
            return HTTPStatus.OK, self._answers[path](parameters)
        except QueryError as error:
            return HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except RunError as error:
            return HTTPStatus.NOT_FOUND, {"error": str(error)}
        except PipelineError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}

    def _runs(self, parameters: Parameters) -> dict[str, Any]:
        runs = [read_trend(directory) for directory in self._directories.values()]
        return {"runs": runs, "metrics": {name: metric_facts(name) for run in runs for name in run["metrics"]}}

    def _rows(self, parameters: Parameters) -> dict[str, Any]:
        query = RowQuery(
            where=parameters.get("where", ""),
            sort=parameters.get("sort", "row"),
            descending="descending" in parameters,
            offset=_number(parameters, "offset", 0),
            limit=_number(parameters, "limit", 50),
        )
        kept, step = self._open(parameters)
        return select_rows(kept, step, self._tables.of(kept, step), query)

    def _row(self, parameters: Parameters) -> dict[str, Any]:
        kept, step = self._open(parameters)
        rows = read_row_tokens(kept, step, [_number(parameters, "row")], self._texts_of(kept))
        return {"rows": rows, "colorings": colorings(rows), "runs": list(self._directories)}

    def _group(self, parameters: Parameters) -> dict[str, Any]:
        kept, step = self._open(parameters)
        found = rows_of_group(kept, step, self._tables.of(kept, step), _number(parameters, "group"))
        first = _number(parameters, "offset", 0)
        rows = read_row_tokens(kept, step, found[first : first + GROUP_ROWS], self._texts_of(kept), GROUP_TOKENS)
        return {"rows": rows, "colorings": colorings(rows), "num_found": len(found)}

    def _open(self, parameters: Parameters) -> tuple[KeptRun, int]:
        run_id, step = parameters.get("run", ""), _number(parameters, "step")
        if run_id not in self._directories:
            raise RunError(f"run {run_id!r} is not open; those that are: {', '.join(self._directories)}")
        return KeptRun(self._directories[run_id], only=step), step

    def _texts_of(self, kept: KeptRun) -> TokenTexts | str:
        if kept.run_id not in self._texts:
            try:
                self._texts[kept.run_id] = kept.texts
            except ModelError as error:
                self._texts[kept.run_id] = str(error)
        return self._texts[kept.run_id]


def _number(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise QueryError(f"{name} must be a number from 0, got {text!r}")
    return int(text)
