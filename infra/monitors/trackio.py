"""The trackio sink."""

import json
import subprocess
import sys
from typing import Any

from infra.monitors.rows import Position, Row
from schemas.config.monitor import TrackioMonitor
from schemas.config.run import RunConfig


class TrackioSink:
    """A `Sink` that writes to a run in trackio's database on this machine."""

    def __init__(self, monitor: TrackioMonitor, run_id: str, config: RunConfig) -> None:
        import trackio

        self._run = trackio.init(
            monitor.project,
            name=run_id,
            resume="allow",
            config=config.model_dump(mode="json"),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self._project, self._run_id = monitor.project, run_id

    def position(self) -> Position:
        """Return the run's last step and evaluation, by trackio's command for queries."""
        if not self._exists():
            return Position()
        name = self._run_id.replace("'", "''")
        sql = (
            """SELECT json_extract(metrics, '$."eval/step"') IS NOT NULL AS evaluation, MAX(step) AS step """
            f"FROM metrics WHERE run_name = '{name}' GROUP BY 1"
        )
        command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", self._project]
        found = subprocess.run([*command, "--sql", sql, "--json"], check=True, capture_output=True, text=True)
        rows: list[dict[str, Any]] = json.loads(found.stdout)["rows"]
        last = {bool(row["evaluation"]): row["step"] for row in rows}
        return Position(last.get(False, -1), last.get(True, -1))

    def log(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.values.items() if name != "step"}, step=row.step)

    def close(self, succeeded: bool) -> None:
        self._run.finish()

    def _exists(self) -> bool:
        from trackio import Api

        try:
            return any(run.name == self._run_id for run in Api().runs(self._project))
        except ValueError:  # there is no such project yet
            return False
