"""What workers measure, and the traces of profiled steps: a policy rank and a rollout worker as plain objects."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.storage.runs import RunDirectory, find_traces
from infra.stores.open import open_store as open_run_store
from infra.workers.policy import PolicyWorker
from rl_core.planning import plan_forward
from rl_core.views import decode_ints, with_column
from schemas.metrics import Metrics, values
from schemas.step import RunHandle, UpdateReport
from tests.support.configs import run_config
from tests.support.policy_runs import NUM_ROWS, plan_of, put_rows, with_advantages
from tests.support.rollout_workers import make_folder, open_store, run_of, worker_of
from tests.support.tiny import make_tiny_data, make_tiny_model

PARTS = ("forward", "backward", "optimizer")


def train_step(folder: Path, directory: str, **runtime: Any) -> tuple[UpdateReport, Metrics, dict[str, torch.Tensor]]:
    """Score and train the rows of step 0; return the report, what scoring measured, and the new weights."""
    config = run_config(
        folder,
        rollout={"max_response_tokens": 9},
        packing={"token_budget": 24},
        store={"kind": "fsspec"},
        runtime=runtime,
    )
    run = RunHandle(run_id="run-1", identity="run-1", directory=directory, config=config, store_incarnation="g")
    worker, batch = PolicyWorker(run), put_rows(run, 0)
    worker.start()
    lengths = decode_ints(batch.prompt_lengths), decode_ints(batch.response_lengths)
    result = worker.score(batch, plan_forward(*lengths, num_ranks=1, token_budget=24), 0)
    batch = with_advantages(run, with_column(batch, result.put.dtypes, [result.put.chunk], range(NUM_ROWS)))
    report = worker.update(batch, plan_of(run, batch), 0)
    open_run_store(run).clear(0)
    with worker.weights(1) as weights:
        return report, result.telemetry, {name: tensor.clone() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("telemetry")
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", 8)
    return folder


def ranges_of(directory: RunDirectory, name: str) -> set[str]:
    """Return the names of the annotated ranges of a trace."""
    content = directory.folder.read(name)
    assert content is not None
    events = json.loads(gzip.decompress(content))["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_policy_rank_measures_and_profiles_without_another_result(folder: Path) -> None:
    plain, scoring, weights = train_step(folder, str(folder / "runs" / "run-1"))
    assert scoring.keys() == {"step/logprob_tokens_per_second", "memory/policy-0_rss_bytes"}  # no MFU on a CPU
    measured = values(plain.telemetry)
    assert measured.keys() == {
        "step/update_tokens_per_second",
        "memory/policy-0_rss_bytes",
        *(f"update/{part}_seconds{suffix}" for part in PARTS for suffix in ("", "_max")),
    }
    assert all(value > 0 for value in measured.values())

    place = "memory://runs/run-1"
    profiled, _, same = train_step(folder, place, profile_steps=[0], runs_dir="memory://runs")
    assert profiled.metrics == plain.metrics
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    directory = RunDirectory(place)
    names = [f"profile/step-000000/policy-0-{phase}.json.gz" for phase in ("logprob", "update")]
    assert find_traces(directory) == names
    assert ranges_of(directory, names[0]) >= {"logprob", "forward"}
    assert ranges_of(directory, names[1]) >= {"update", *PARTS}
    assert not find_traces(RunDirectory(folder / "runs" / "run-1"))


def test_a_rollout_worker_measures_its_engine_and_profiles_its_first_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    monkeypatch.syspath_prepend(folder)
    run = run_of(folder)
    run = run.replace(config=run.config.replace(runtime=run.config.runtime.replace(profile_steps=(1,))))
    worker = worker_of(run, store=open_store())
    shards = [worker.generate(step, 0, shard, (shard,)) for step in (0, 1) for shard in (0, 1)]
    found = values(shards[0].telemetry)
    rows = run.config.rollout.samples_per_prompt
    assert found.keys() == {
        "step/rollout_tokens_per_second",
        "memory/rollout-0_rss_bytes",
        "engine/running",
        "engine/waiting",
        "engine/prefill_tokens",
        "engine/cache",
    }
    assert 1 <= found["engine/running"] <= rows
    assert found["engine/waiting"] == 0
    assert 0 < found["engine/cache"] < 1
    directory = RunDirectory.of(run)
    assert find_traces(directory) == ["profile/step-000001/rollout-0-rollout.json.gz"]
    assert ranges_of(directory, find_traces(directory)[0]) >= {"rollout", "generate", "reward"}
