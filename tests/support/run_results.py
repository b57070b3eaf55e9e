"""What a run has written, as tests compare it."""

import hashlib
import json
import os
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from infra.environments.answers import OTHERWISE
from infra.environments.journal import load
from infra.storage.ledger import step_folder
from infra.storage.runs import RunDirectory
from infra.stores.offline import open_run_columns
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

    def stored_rows(self, num_steps: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of each step, which the store has kept."""
        store = open_run_columns(self)
        for step in range(num_steps):
            batch = store.load_batch(step)
            assert batch is not None, f"step {step} has no columns"
            yield store.read(batch, batch.columns).to_pylist()

    def keep_journals(self, kept: Path, has_ended: Event) -> None:
        """Keep what the journals get, though those of a step are deleted with its end, until the run has ended."""
        while not has_ended.wait(0.02):
            for file in self.path.glob("journal/*/*.jsonl"):
                with suppress(FileExistsError, FileNotFoundError):  # it is linked, or deleted meanwhile
                    os.link(file, kept / f"{file.parent.name}-{file.name}")

    def store_bytes_at_end(self) -> int:
        """Return what the column store held when the run ended."""
        summary = self.summary()
        assert summary is not None
        return summary.store_bytes_at_end


def count_turns(journals: Iterable[Path], rows: Iterable[Mapping[str, Any]], log: str) -> Counter[str]:
    """Count the turns of rows, and how often they were sampled, by what was recorded before a program got them.

    Returns:
        `turns` of the rows; `turns_recorded`: those of which a journal has a line; `turns_recorded_again`: of these,
        those of which a later attempt has, too; `turns_sampled_twice`: those of which a line or the row has other
        tokens, or other bits of their log-probs, than another one, or of which the run's log says so.
    """
    versions, attempts, turns = defaultdict(set), defaultdict(set), set[str]()
    for file in journals:
        step = int(file.name.split("-")[1])
        for line in file.read_text(errors="replace").splitlines(keepends=True)[1:]:
            with suppress(ValueError):  # a kill has cut it short
                if "token_ids" in (entry := load(line)):
                    turn = f"{step}-{entry['group']}-{entry['sample']} {entry['turn']}"
                    versions[turn].add((*entry["token_ids"], entry["logprobs"]))
                    attempts[turn].add(file)
    for row in rows:
        at, logprobs = 0, np.array(row["sampler_logprobs"], "<f4")
        lengths = zip(row.get("turn_tokens", ()), row.get("turn_bridge_tokens", ()), strict=True)
        for number, (length, between) in enumerate(lengths, start=1):
            bits = b64encode(logprobs[at : at + length].tobytes()).decode()
            turns.add(turn := f"{row['sample_id']} {number}")
            versions[turn].add((*row["response_ids"][at : at + length], bits))
            at += length + between
    return Counter(
        turns=len(turns),
        turns_recorded=len(attempts),
        turns_recorded_again=sum(len(files) > 1 for files in attempts.values()),
        turns_sampled_twice=sum(len(found) > 1 for found in versions.values()) + log.count(OTHERWISE),
    )


def _is_whole(entry: bytes | None) -> bool:
    """Return whether an entry was written to its end: Prefect writes it in place, and may be killed meanwhile."""
    try:
        return bool(json.loads(entry or "null"))
    except ValueError:
        return False
