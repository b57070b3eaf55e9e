"""Held-out evaluation by several rollout workers: the report of one worker, whoever dies."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.ray.actors import call
from infra.storage.runs import RunDirectory
from infra.workers.launch import find_worker, get_group, kill_workers
from rl_core.views import with_groups
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.evaluate import evaluate_policy
from tasks.logprob import score_behavior
from tests.configs import run_config
from tests.infra.policy_runs import plan_of, put_rows, with_advantages
from tests.tiny import make_tiny_data, make_tiny_model, tiny_row, write_rows

pytestmark = pytest.mark.slow

NUM_HELD_OUT, KILLING_ROW = 7, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    make_tiny_model(folder / "model")
    make_tiny_data(folder / "train.parquet", 8)
    rows = [tiny_row(index, data_source=("sums", "more")[index % 2]) for index in range(NUM_HELD_OUT)]
    rows[KILLING_ROW]["extra_info"]["kills"] = str(folder / "kill")
    write_rows(folder / "eval.jsonl", rows)
    return folder


def run_of(folder: Path, num_workers: int) -> RunHandle:
    config = run_config(
        folder,
        data={"eval_path": str(folder / "eval.jsonl")},
        reward={
            "kind": "function",
            "path": "tests.tasks.deadly_reward:short",
            "num_processes": 0,
            "timeout_seconds": None,
        },
        rollout={"max_response_tokens": 9, "num_workers": num_workers},
        eval={"samples_per_prompt": 3, "temperature": 1.0, "batch_prompts": 2, "accuracy_threshold": 0.9},
        optim={"lr": 1e-2, "updates_per_step": 2},
        packing={"token_budget": 24},
        store={"kind": "fsspec"},
    )
    run_id = f"evaluate-{num_workers}"
    directory = RunDirectory.create(config, run_id)
    return RunHandle(run_id=run_id, directory=str(directory.path), config=config, store_incarnation="g")


async def train_step(run: RunHandle) -> PolicyHandle:
    """Update version 0 with made-up rows, the same for every run."""
    group = await get_group(run, "policy")
    batch, policy = put_rows(run, 0), (await group.call("handle"))[0]
    scored = with_groups(batch, [(await score_behavior.fn(run, policy, batch)).group])
    return (await group.call("update", with_advantages(run, scored), plan_of(run, batch), 0))[0].policy


async def versions(run: RunHandle) -> list[int]:
    """Return the policy version that each rollout worker holds."""
    workers = [find_worker(run.run_id, "rollout", number) for number in range(run.config.rollout.num_workers)]
    return await asyncio.gather(*(call(worker, "version") for worker in workers))


async def evaluate(run: RunHandle, killed_at: int | None) -> list[EvalReport]:
    """Evaluate versions 0 and 1; a rollout worker dies in the evaluation of version `killed_at`."""
    order = Path(run.directory).parents[1] / "kill"
    reports = []
    for version in (0, 1):
        policy = await train_step(run) if version else PolicyHandle(run_id=run.run_id, version=0, incarnation="i")
        if version == killed_at:
            order.touch()
        report = await evaluate_policy.fn(run, policy)
        assert not order.exists()
        assert report.policy_version == version
        reports.append(report.replace(seconds=0.0))
    return reports


@pytest.fixture
def run(request: pytest.FixtureRequest, folder: Path, ray_cluster: None) -> Iterator[RunHandle]:
    run = run_of(folder, request.param)
    yield run
    kill_workers(run.run_id, run.config)


@pytest.fixture(scope="module")
def expected(folder: Path, ray_cluster: None) -> list[EvalReport]:
    """The reports of a run of one worker."""
    run = run_of(folder, 1)
    reports = asyncio.run(evaluate(run, killed_at=None))
    kill_workers(run.run_id, run.config)
    return reports


def test_each_version_is_evaluated_with_its_own_weights(expected: list[EvalReport]) -> None:
    before, after = expected
    assert before.num_prompts == after.num_prompts == NUM_HELD_OUT
    assert [(source.data_source, source.num_prompts) for source in before.sources] == [("sums", 4), ("more", 3)]
    assert 0 < before.accuracy < 1
    assert before.replace(policy_version=1) != after


@pytest.mark.parametrize(("run", "killed_at"), [(2, 0), (3, 1)], indirect=["run"])
def test_several_workers_report_the_same_bit_for_bit_even_if_one_dies(
    run: RunHandle, killed_at: int, expected: list[EvalReport], caplog: pytest.LogCaptureFixture
) -> None:
    assert asyncio.run(evaluate(run, killed_at)) == expected
    lost = [message for message in caplog.messages if "is lost, other workers take over its work" in message]
    assert len(lost) == 1
    if killed_at == 0:  # all workers lived through the next evaluation, which gave them its weights
        assert asyncio.run(versions(run)) == [1] * run.config.rollout.num_workers
