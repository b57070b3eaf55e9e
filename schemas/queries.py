"""What the saved queries of a run say about its steps."""

from pydantic import NonNegativeInt

from schemas.base import Frozen


class FailedQuery(Frozen):
    """A saved query that returned rows for a step, or could not be answered."""

    name: str  # of its file, without `.sql`
    num_rows: NonNegativeInt = 0
    rows: tuple[str, ...] = ()  # the first ones, as JSON
    error: str | None = None

    def __str__(self) -> str:
        what = self.error or f"{self.num_rows:,} row{'s' if self.num_rows > 1 else ''}, such as {self.rows[0]}"
        return f"query {self.name}: {what}"


class QueryReport(Frozen):
    """The saved queries that one step has failed, in the order of their names."""

    failed: tuple[FailedQuery, ...]
