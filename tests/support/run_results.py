"""What a run has written, as tests compare it."""

import hashlib
import json
from pathlib import Path

from infra.storage.ledger import step_folder
from infra.storage.runs import RunDirectory
from schemas.step import EvalReport


class Run(RunDirectory):
    """The results of a run, as tests compare them."""

    def committed(self, step: int, stage: str) -> bool:
        """Return whether the ledger holds a stage of a step."""
        return bool(self.entries(step, f"{stage}-"))

    def passed(self, step: int, stage: str) -> bool:
        """Return whether a stage of a step is committed, or the whole step is done: its ledger may be dropped then."""
        return self.num_done > step or self.committed(step, stage)

    @property
    def num_done(self) -> int:
        """How many steps are done, without reading their metrics: it is asked in waits, many times a second."""
        return sum(line.startswith('{"kind": "step"') for line in self._lines("metrics", ".jsonl").read())

    def entries(self, step: int, beginning: str = "") -> dict[str, float]:
        """Return when each of a step's ledger entries was written, by name; of those that begin so, and are whole."""
        entries = self.folder.within(f"ledger/{step_folder(step)}")
        whole = [name for name in entries.sizes() if name.startswith(beginning) and _is_whole(entries.read(name))]
        return {name: time for name in whole if (time := entries.modified(name)) is not None}

    def step_ledger(self, step: int) -> Path:
        return self.path / "ledger" / step_folder(step)

    def weights(self, version: int) -> str:
        """Return the digest of a checkpoint's weights and optimizer state."""
        folder = self.folder.within(f"policy/step-{version:06d}")
        shards = sorted(name for name in folder.sizes() if name.endswith(".safetensors"))
        assert shards, f"{folder} holds no checkpoint"
        return hashlib.sha256(b"".join(folder.read_all(shards))).hexdigest()

    def step_metrics(self) -> list[dict[str, float]]:
        """Return each step's metrics, without times."""
        return [
            {name: value for name, value in report.metrics.items() if not name.endswith("_seconds")}
            for report in self.metrics.steps()
        ]

    def evaluations(self) -> list[EvalReport]:
        """Return the evaluations, without times."""
        return [report.replace(seconds=0.0) for report in self.metrics.evals()]

    def generate_seconds(self) -> list[float]:
        """Return how long each step's rollout took when it was generated."""
        return [report.metrics["rollout/generate_seconds"] for report in self.metrics.steps()]

    def store_bytes_at_end(self) -> int:
        """Return what the column store held when the run ended."""
        summary = self.summary()
        assert summary is not None
        return summary.store_bytes_at_end


def _is_whole(entry: bytes | None) -> bool:
    """Return whether an entry was written to its end: Prefect writes it in place, and may be killed meanwhile."""
    try:
        return bool(json.loads(entry or "null"))
    except ValueError:
        return False
