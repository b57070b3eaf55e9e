"""Questions about past steps: SQL over the kept columns of a run, the pages of `sluice view`, two equal runs compared.

The runs are written by hand, with random values in columns of real shapes: rollout chunks of two workers, log-probs of
two ranks in another order, advantages. Each time is that of the first call in a process that has the modules loaded.
"""

import json
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.command import benchmark_session, print_report
from flows.view.api import ViewApi
from infra.history.diff import diff_runs
from infra.history.sql import RunQueries
from infra.storage.runs import RunDirectory
from infra.stores.files import FsspecColumnStore
from rl_core.columns.jagged import jagged
from rl_core.views import new_batch, select, with_column
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.run import RunConfig

PROMPT_TOKENS = 64
VOCABULARY = 32_000
WORKERS = RANKS = 2
GROUP = 8  # samples of a prompt

QUERIES = {
    "kl by step": "select step, avg(reference_logprobs - behavior_logprobs) from tokens group by step",
    "gap by token": "select response_ids, avg(sampler_logprobs - behavior_logprobs), count(*) from tokens group by 1",
    "reward by step": "select step, avg(reward), max(num_response_tokens) from rows group by step",
    "one step": "select group_id, avg(advantages) from tokens where step = 0 group by group_id",
}

STEP = {"run": "first", "step": "0"}
PAGES = {
    "view: a step's first page": ("/api/rows", {}),
    "view: sorted": ("/api/rows", {"sort": "gap_max", "descending": "1"}),
    "view: filtered": ("/api/rows", {"where": "reward > 0.5 and num_response_tokens < 200"}),
    "view: filtered by tokens": (
        "/api/rows",
        {"where": "row in (select row from tokens where sampler_logprobs < -12)"},
    ),
    "view: a row": ("/api/row", {"row": "7"}),
    "view: a group": ("/api/group", {"group": "3"}),
}

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Kept steps.", min=1)] = 100,
    tokens: Annotated[int, typer.Option(help="Response tokens per step.", min=1)] = 260_000,
    rows: Annotated[int, typer.Option(help="Rows per step, a multiple of 16.", min=16)] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Measure SQL over a run's kept steps, the pages of `sluice view`, and the comparison with an equal run."""
    with benchmark_session(), tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        report = measure(Path(folder), steps, tokens, rows)
    print_report(report, as_json, render)


def measure(folder: Path, steps: int, tokens: int, rows: int) -> dict[str, Any]:
    """Write two equal runs, and return the seconds of each question."""
    first, second = (write_run(folder, name, steps, tokens, rows) for name in ("first", "second"))
    num_bytes = sum(FsspecColumnStore(first.run_id, first.columns).bytes_by_step().values())
    seconds = {}
    with RunQueries([first]) as queries:
        counted = queries.query("select count(*) as n from tokens").to_pylist()[0]["n"]
        for name, sql in QUERIES.items():
            seconds[name] = _timed(lambda sql=sql: queries.query(sql))  # type: ignore[misc]
    view = ViewApi([first])
    for name, (path, parameters) in PAGES.items():
        seconds[name] = _timed(lambda path=path, own=parameters: _ask(view, path, {**STEP, **own}))  # type: ignore[misc]
    found = []
    seconds["diff of equal runs"] = _timed(lambda: found.extend(diff_runs(first, second)))
    return {
        "steps": steps,
        "tokens": counted,
        "bytes_per_token": num_bytes / counted,
        "different_steps": sum(bool(step.stages) for step in found),
        "seconds": seconds,
    }


def render(report: dict[str, Any]) -> Group:
    """Return the report as a line and a table."""
    title = (
        f"{report['steps']} steps, {report['tokens']:,} response tokens, {report['bytes_per_token']:.1f} bytes each; "
        f"{report['different_steps']} of them differ between the two runs"
    )
    table = Table("question", "seconds")
    for name, seconds in report["seconds"].items():
        table.add_row(name, f"{seconds:.2f}")
    return Group(title, table)


def write_run(folder: Path, run_id: str, steps: int, tokens: int, rows: int) -> RunDirectory:
    """Write a run with the columns of its steps; equal sizes give equal columns."""
    values = {
        "name": run_id,
        "steps": steps,
        "model": {"path": str(folder / "model")},
        "data": {"train_path": "none"},
        "reward": {"kind": "exact"},
        "store": {"keep_steps": "all"},
        "runtime": {"runs_dir": str(folder)},
    }
    _write_tokenizer(folder / "model")
    directory = RunDirectory.create(RunConfig.model_validate(values), run_id)
    store = FsspecColumnStore(run_id, directory.columns)
    for step in range(steps):
        _write_step(store, step, tokens, rows)
    return directory


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Tokenizer(WordLevel({f" word{token}": token for token in range(VOCABULARY)})).save(str(folder / "tokenizer.json"))


def _write_step(store: FsspecColumnStore, step: int, tokens: int, rows: int) -> None:
    random = np.random.default_rng(step)
    lengths = random.multinomial(tokens - rows, random.dirichlet(np.full(rows, 2.0))) + 1
    prompts = np.full(rows, PROMPT_TOKENS)
    columns = pa.record_batch(
        {
            "prompt_ids": jagged(random.integers(0, VOCABULARY, prompts.sum()).astype(np.uint16), prompts),
            "response_ids": jagged(random.integers(0, VOCABULARY, tokens).astype(np.uint16), lengths),
            "loss_mask": jagged(np.ones(tokens, dtype=bool), lengths),
            "sampler_logprobs": _logprobs(random, lengths),
            "reward": pa.array(random.integers(0, 2, rows).astype(np.float32)),
            "response_text": pa.array(["word" * int(length) for length in lengths]),
            "group_id": pa.array((np.arange(rows) // GROUP).astype(np.int32)),
        }
    )
    dtypes = {"prompt_ids": "uint16", "response_ids": "uint16", "loss_mask": "bool", "sampler_logprobs": "float"}
    dtypes |= {"reward": "float", "response_text": "string", "group_id": "int32"}
    store.open(step)
    part = rows // WORKERS
    keys = [ChunkKey(run_id=store.run_id, step=step, stage="rollout", shard=at) for at in range(WORKERS)]
    refs = [store.put(key, columns.slice(at * part, part)) for at, key in enumerate(keys)]
    batch = new_batch(store.run_id, step, step, refs, dtypes, prompts, lengths)
    for stage in ("behavior", "reference"):
        batch = _score(store, batch, stage, random, lengths)
    advantages = pa.record_batch({"advantages": pa.array(random.normal(size=rows).astype(np.float32))})
    ref = store.put(ChunkKey(run_id=store.run_id, step=step, stage="advantage"), advantages, batch)
    store.save_batch(with_column(batch, {"advantages": "float"}, [ref], range(rows)))
    store.archive(step)


def _score(
    store: FsspecColumnStore, batch: BatchHandle, stage: str, random: np.random.Generator, lengths: NDArray[np.int64]
) -> BatchHandle:
    """Put log-probs as ranks do: each those of its own rows, in the order of its plan."""
    order, name = random.permutation(batch.num_rows), f"{stage}_logprobs"
    refs = []
    for rank, own in enumerate(np.split(order, RANKS)):
        key = ChunkKey(run_id=store.run_id, step=batch.step, stage=stage, shard=rank)
        refs.append(store.put(key, pa.record_batch({name: _logprobs(random, lengths[own])}), select(batch, own)))
    return with_column(batch, {name: "float"}, refs, order)


def _logprobs(random: np.random.Generator, lengths: NDArray[np.int64]) -> pa.LargeListArray:
    return jagged(-random.exponential(size=int(lengths.sum())).astype(np.float32), lengths)


def _ask(view: ViewApi, path: str, parameters: dict[str, str]) -> bytes:
    """Return the bytes of an answer, as the server sends them."""
    status, value = view.answer(path, parameters)
    assert status == HTTPStatus.OK, value
    return json.dumps(value).encode()


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    app()
