"""Rows of supervised fine-tuning: encoded once, kept in the run's directory, and made again if they don't fit."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from prefect.logging import disable_run_logger

import flows.train
from flows.deployments import entrypoints
from flows.lifecycle.cancellation import Notice
from flows.preflight import check_run
from flows.recovery import find_or_create_run
from flows.ui.events import RunEvents
from infra.datasets.sft import SftDataset, load_rows, load_train_rows
from infra.models.load import load_tokenizer
from infra.models.tiny import CHAT_TEMPLATE
from infra.monitors import Monitors
from infra.storage.folder import Folder
from infra.storage.runs import RunDirectory
from infra.workers import inputs
from infra.workers.inputs import RowSet, keep_rows, open_rows
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.step import RunHandle
from tests.support.sft import sft_config, sft_toml, sums, write_sums
from tests.support.tiny import make_tiny_model, write_rows

Encodings = Callable[[], int]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[RunConfig]:
    """The config of a run of 24 rows and 5 held-out ones, in a process that has encoded nothing yet."""
    make_tiny_model(tmp_path / "model")
    write_sums(tmp_path)
    inputs._encoded.clear()
    yield sft_config(tmp_path, data={"eval_path": str(tmp_path / "heldout.jsonl")})
    inputs._encoded.clear()


@pytest.fixture
def encodings(caplog: pytest.LogCaptureFixture) -> Encodings:
    """How many sets of rows were encoded since the last call."""
    caplog.set_level("INFO")

    def count() -> int:
        found = sum(record.message.startswith("encoded ") for record in caplog.records)
        caplog.clear()
        return found

    return count


def in_another_process() -> None:
    """Forget what this process has encoded, as the next driver or a worker hasn't encoded it."""
    inputs._encoded.clear()


def values(rows: SftDataset) -> list[list[Any]]:
    return [[row.prompt_ids.tolist(), row.response_ids.tolist(), row.loss_mask.tolist()] for row in rows]


def expected(config: RunConfig, rows: RowSet) -> list[list[Any]]:
    tokenizer = load_tokenizer(config.model)
    if rows == "train":
        return values(load_train_rows(config, tokenizer))
    assert config.data.eval_path is not None
    return values(load_rows(config.data.eval_path, config, tokenizer))


def test_rows_are_encoded_by_the_check_and_never_again(config: RunConfig, encodings: Encodings) -> None:
    check_run(config)
    assert encodings() == 2
    run = find_or_create_run(config, "run-1")
    keep_rows(run, config)
    in_another_process()
    opened = {rows: open_rows(run, config, rows) for rows in ("train", "held-out")}  # as a worker does
    check_run(config, run)  # as a resume does
    keep_rows(run, config)
    assert encodings() == 0
    for rows, found in opened.items():
        assert values(found) == expected(config, rows)


def test_a_run_without_a_check_encodes_its_rows_once(config: RunConfig, encodings: Encodings) -> None:
    run = find_or_create_run(config, "run-1")
    keep_rows(run, config)
    assert encodings() == 2
    in_another_process()
    assert len(open_rows(run, config, "train")) == 24
    assert encodings() == 0


def test_a_check_and_the_run_have_the_same_date(config: RunConfig, encodings: Encodings) -> None:
    (Path(config.model.path) / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    check_run(config)
    run = find_or_create_run(config, "run-1")
    assert run.config().data.date is not None
    keep_rows(run, run.config())
    assert encodings() == 2


def test_a_deployment_checks_a_run_as_it_goes_on(
    tmp_path: Path, config: RunConfig, encodings: Encodings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.toml").write_text(sft_toml())
    (Path(config.model.path) / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE)
    asked = load_config(Path("sft.toml"))
    begun = asked.replace(data=asked.data.with_date("2026-01-01"))
    keep_rows(find_or_create_run(begun, "run-1"), begun)
    in_another_process()
    encodings()

    async def nothing(_: object) -> None:
        """Stand for what asks the Prefect server: there is none."""

    async def go_on(config: RunConfig, run_id: str) -> tuple[RunConfig, str]:
        return config, run_id

    async def awaited(work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    for name in ("rename_flow_run", "_require_progress"):
        monkeypatch.setattr(entrypoints, name, nothing)
    for name, replaced in (("_train_in_turn", go_on), ("cancellable", awaited)):
        monkeypatch.setattr(entrypoints, name, replaced)
    changed = asyncio.run(entrypoints.train.fn("sft.toml", ("steps=9",), "run-1"))
    assert changed == (begun.replace(steps=9), "run-1")
    assert encodings() == 0
    with disable_run_logger():
        refused = asyncio.run(entrypoints.train.fn("sft.toml", ("seed=1",), "run-1"))
    assert "can't be resumed with a different seed" in refused.message


def other_rows(config: RunConfig) -> RunConfig:
    write_rows(Path(config.data.train_sources[0].path), [sums(number) for number in range(7)])
    return config


def other_template(config: RunConfig) -> RunConfig:
    file = Path(config.model.path) / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|' +", "<| ' +"))
    return config


def other_end(config: RunConfig) -> RunConfig:
    file = Path(config.model.path) / "generation_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "eos_token_id": [content["eos_token_id"], 5]}))
    return config


def other_settings(config: RunConfig, **settings: Any) -> RunConfig:
    assert config.sft is not None
    return config.replace(sft=config.sft.replace(**settings))


@pytest.mark.parametrize(
    "change",
    [
        other_rows,
        other_template,
        other_end,
        lambda config: other_settings(config, loss_on="last_turn"),
        lambda config: other_settings(config, max_tokens=199),
        lambda config: config.replace(data=config.data.replace(overlong="drop")),
        lambda config: config.replace(data=config.data.replace(train_path=config.data.eval_path)),
    ],
)
def test_rows_of_other_inputs_are_not_taken(
    config: RunConfig, encodings: Encodings, change: Callable[[RunConfig], RunConfig]
) -> None:
    run = find_or_create_run(config, "run-1")
    keep_rows(run, config)
    in_another_process()
    encodings()
    changed = change(config)
    assert values(open_rows(run, changed, "train")) == expected(changed, "train")
    assert encodings() >= 1
    keep_rows(run, changed)
    in_another_process()
    encodings()
    assert values(open_rows(run, changed, "train")) == expected(changed, "train")
    assert encodings() == 1  # of `expected`


@pytest.mark.parametrize("at", range(4))
def test_a_driver_that_is_killed_while_it_writes(
    config: RunConfig, encodings: Encodings, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = find_or_create_run(config, "run-1"), list[str]()

    class Killed(BaseException):
        pass

    def killed(original: Callable[..., None]) -> Callable[..., None]:
        def write(folder: Folder, name: str, data: Any, **options: Any) -> None:
            calls.append(name)
            if len(calls) == at + 1:  # half of it is there, under a hidden name or, in a bucket, under its own
                original(folder, name, data[: len(data) // 2], **options)
                raise Killed
            original(folder, name, data, **options)

        return write

    with monkeypatch.context() as patch, suppress(Killed):
        for name in ("write", "write_large"):
            patch.setattr(Folder, name, killed(getattr(Folder, name)))
        keep_rows(run, config)
    in_another_process()
    keep_rows(run, config)
    in_another_process()
    encodings()
    found = values(open_rows(run, config, "train")), values(open_rows(run, config, "held-out"))
    assert encodings() == 0
    assert found == (expected(config, "train"), expected(config, "held-out"))


def train(run: RunDirectory, config: RunConfig) -> Coroutine[Any, Any, RunHandle]:
    """Return the work of a run's driver, up to where its workers start."""
    handle = RunHandle(run_id="run-1", identity="run-1", directory=run.url, config=config, store_incarnation="first")
    monitors, events = Monitors("run-1", []), RunEvents("run-1", run.runs_dir, 0)
    return flows.train._training_loop(handle, run, monitors, events, Notice(1))


def test_rows_that_can_not_be_written_end_a_run_before_its_workers_start(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = find_or_create_run(config, "run-1")
    (run.path / "rows").write_text("a file, where the folder should be")
    monkeypatch.setattr(flows.train, "_start_workers", lambda _: pytest.fail("workers were started"))
    with disable_run_logger(), pytest.raises(OSError, match="rows"):
        asyncio.run(train(run, config))


def test_a_driver_that_is_cancelled_ends_after_what_it_writes(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, is_cancelled, written = find_or_create_run(config, "run-1"), threading.Event(), list[RunDirectory]()

    async def start_workers(_: RunHandle) -> None:
        await asyncio.Event().wait()

    async def cancel() -> list[RunDirectory]:
        is_begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def write(directory: RunDirectory, _: RunConfig) -> None:
            loop.call_soon_threadsafe(is_begun.set)
            is_cancelled.wait()
            time.sleep(0.2)  # for which a driver that doesn't wait would have ended
            written.append(directory)

        monkeypatch.setattr(flows.train, "keep_rows", write)
        driver = asyncio.create_task(train(run, config))
        await is_begun.wait()
        driver.cancel()
        is_cancelled.set()
        with suppress(asyncio.CancelledError):
            await driver
        return list(written)

    monkeypatch.setattr(flows.train, "_start_workers", start_workers)
    with disable_run_logger():
        assert asyncio.run(cancel()) == [run]


@pytest.mark.parametrize("process", ["the same", "another"])
@pytest.mark.parametrize("name", ["train.arrow", "train.json"])
@pytest.mark.parametrize("damage", ["a byte", "half", "all", "no file"])
def test_a_damaged_file_is_made_again(
    config: RunConfig, encodings: Encodings, damage: str, name: str, process: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = find_or_create_run(config, "run-1")
    keep_rows(run, config)
    if process == "another":
        in_another_process()
    encodings()
    file = run.path / "rows" / name
    content, half = file.read_bytes(), file.stat().st_size // 2
    changed = content[:half] + bytes([content[half] ^ 128]) + content[half + 1 :]
    file.write_bytes({"a byte": changed, "half": content[:half]}.get(damage, b""))
    if damage == "no file":
        file.unlink()
    check_run(config, run)
    assert ("the rows are encoded again" in caplog.text) == ((name, damage) != ("train.json", "no file"))
    assert encodings() == 1
    keep_rows(run, config)
    in_another_process()
    encodings()
    found = values(open_rows(run, config, "train"))
    assert encodings() == 0
    assert found == expected(config, "train")


def test_the_last_sets_of_rows_that_were_checked_are_not_encoded_again(config: RunConfig, encodings: Encodings) -> None:
    configs = [other_settings(config, max_tokens=200 + number) for number in range(inputs._KEPT + 1)]
    for each in configs:
        open_rows(None, each, "train")
    assert encodings() == len(configs)
    for each in configs[1:]:
        open_rows(None, each, "train")
    assert encodings() == 0
    open_rows(None, configs[0], "train")
    assert encodings() == 1


def test_a_full_disk_of_temporary_files_is_named(
    config: RunConfig, small_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_memory / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))
    with pytest.raises(DataError, match=rf"{folder}, has no space for .*rows\.jsonl.*No space left.*TMPDIR"):
        check_run(config)
    (folder / "full").unlink()
    check_run(config)


def test_runs_of_one_process_have_their_own_weights_of_sources(config: RunConfig, tmp_path: Path) -> None:
    def first_step(*weights: float) -> list[int]:
        paths = [str(tmp_path / name) for name in ("rows.jsonl", "heldout.jsonl")]
        sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
        mixed = sft_config(tmp_path, data={"train_path": None, "sources": sources})
        return open_rows(None, mixed, "train").rows_for_step(0, 8, seed=0, shuffle=False).tolist()

    assert sum(row < 24 for row in first_step(3.0, 1.0)) == 6
    assert sum(row < 24 for row in first_step(1.0, 1.0)) == 4


def test_rows_of_several_batches_take_little_memory(config: RunConfig, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [sums(number) for number in range(3000)])
    before = pa.total_allocated_bytes()
    rows = load_train_rows(config, load_tokenizer(config.model))
    assert pa.total_allocated_bytes() - before < 2**16  # they are mapped
    lengths = [(len(row.prompt_ids), len(row.response_ids)) for row in rows]
    assert lengths == list(zip(rows.prompt_lengths, rows.response_lengths, strict=True))
    assert rows.longest == max(map(sum, lengths))
    assert rows.num_loss_tokens == sum(int(row.loss_mask.sum()) for row in rows)
    assert {row.prompt_ids.dtype for row in rows} == {np.dtype(np.int32)}
