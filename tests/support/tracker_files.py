"""What trackers hold of a run, read back by their own libraries: values by metric and step."""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

History = dict[str, list[tuple[int, float]]]  # (step, value) by metric, in the order in which they were logged

_BLOCK_BYTES, _HEADER_BYTES = 2**15, 7
_FIRST, _FULL, _LAST = 2, 1, 4


def jsonl_history(path: Path) -> History:
    """Return the history in a file of JSON lines."""
    return _history((row["step"], row) for row in map(json.loads, path.read_text().splitlines()))


def tensorboard_history(folder: Path) -> History:
    """Return the history that TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_history(uri: str, run_id: str) -> tuple[History, str]:
    """Return the history and the status of the only MLflow run of this name."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"attributes.run_name = '{run_id}'")
    found = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return found, run.info.status


def trackio_history(project: str, run_id: str) -> History:
    """Return the history of a run in trackio's database."""
    sql = f"SELECT step, json(metrics) AS metrics FROM metrics WHERE run_name = '{run_id}' ORDER BY id"
    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", project, "--sql", sql, "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["rows"]
    return _history((row["step"], json.loads(row["metrics"])) for row in rows)


def wandb_history(folder: Path, run_id: str) -> History:
    """Return the history in a run's offline folders, in the order in which `wandb sync` sends them."""
    files = sorted(folder.glob(f"offline-run-*/run-{run_id}.wandb"))
    return _history(
        (int(row.get("eval/step", row.get("step", -1))), {name: row[name] for name in row if name[0] != "_"})
        for path in files
        for row in _wandb_rows(path)
    )


def _wandb_rows(path: Path) -> Iterator[dict[str, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _log_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def _log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after a header of W&B's own."""
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(content):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _HEADER_BYTES:
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        at += _HEADER_BYTES + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts


def _history(rows: Iterator[tuple[int, dict[str, float]]]) -> History:
    found: History = {}
    for step, values in rows:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found
