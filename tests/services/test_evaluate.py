"""Held-out evaluation by several rollout workers: the report of one worker, whoever dies."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.ray.actors import call
from infra.storage.runs import RunDirectory
from infra.workers.launch import find_worker, get_group, kill_workers
from rl_core.views import with_groups
from schemas.step import EvalReport, PolicyHandle, RunHandle
from tasks.logprob import score_behavior
from tasks.operations import evaluate_policy
from tests.support.configs import run_config
from tests.support.policy_runs import plan_of, put_rows, with_advantages
from tests.support.tiny import make_tiny_data, make_tiny_model, tiny_row, write_rows

pytestmark = pytest.mark.extended

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


@pytest.fixture(scope="module")
def run(folder: Path, ray_cluster: None) -> Iterator[RunHandle]:
    """A run of two rollout workers."""
    config = run_config(
        folder,
        data={"eval_path": str(folder / "eval.jsonl")},
        reward={
            "kind": "function",
            "path": "tests.support.deadly_reward:short",
            "num_processes": 0,
            "timeout_seconds": None,
        },
        rollout={"max_response_tokens": 9, "num_workers": 2},
        eval={"samples_per_prompt": 3, "temperature": 1.0, "batch_prompts": 2, "accuracy_threshold": 0.9},
        optim={"lr": 1e-2, "updates_per_step": 2},
        packing={"token_budget": 24},
        store={"kind": "fsspec"},
    )
    directory = RunDirectory.create(config, "evaluate")
    made = RunHandle(
        run_id="evaluate", identity="evaluate", directory=str(directory.path), config=config, store_incarnation="g"
    )
    yield made
    kill_workers(made.run_id, config)


async def train_step(run: RunHandle) -> PolicyHandle:
    """Update version 0 with made-up rows, the same for every run."""
    group = await get_group(run, "policy")
    batch, policy = put_rows(run, 0), (await group.call("handle"))[0]
    scored = with_groups(batch, [(await score_behavior.fn(run, policy, batch)).group])
    return (await group.call("update", with_advantages(run, scored), plan_of(run, batch), 0))[0].policy


async def versions(run: RunHandle) -> list[int]:
    """Return the policy version that each rollout worker holds."""
    workers = [find_worker(run.run_id, "rollout", number) for number in range(run.config.rollout.num_workers)]
    states = await asyncio.gather(*(call(worker, "weight_group_member") for worker in workers))
    return [state.version for state in states]


async def evaluate(run: RunHandle, policy: PolicyHandle, *, kills: bool = False) -> EvalReport:
    """Evaluate a version; if `kills`, a rollout worker dies meanwhile."""
    order = Path(run.directory).parents[1] / "kill"
    if kills:
        order.touch()
    report = await evaluate_policy.fn(run, policy)
    assert not order.exists()  # one has died
    assert report.policy_version == policy.version
    return report.replace(seconds=0.0)


class Reports(NamedTuple):
    """The report of version 0, those of version 1, and the versions that the workers hold before any dies."""

    before: EvalReport
    by_one: EvalReport
    by_both: EvalReport
    by_the_survivor: EvalReport
    held: list[int]


async def evaluate_all(run: RunHandle) -> Reports:
    """Evaluate version 0 by one of the workers, and version 1 by one, by both, and while one dies."""
    alone = run.replace(config=run.config.replace(rollout=run.config.rollout.replace(num_workers=1)))
    before = await evaluate(alone, PolicyHandle(run_id=run.run_id, version=0, incarnation="i"))
    policy = await train_step(run)
    both, held = await evaluate(run, policy), await versions(run)
    by_one = await evaluate(alone, policy)
    return Reports(before, by_one, both, await evaluate(run, policy, kills=True), held)


@pytest.fixture(scope="module")
def reports(run: RunHandle) -> Iterator[tuple[Reports, list[str]]]:
    """The reports, and what was logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infra").addHandler(handler)
    yield asyncio.run(evaluate_all(run)), messages
    logging.getLogger("infra").removeHandler(handler)


def test_each_version_is_evaluated_with_its_own_weights(reports: tuple[Reports, list[str]]) -> None:
    before, after = reports[0].before, reports[0].by_one
    assert before.num_prompts == after.num_prompts == NUM_HELD_OUT
    assert [(source.data_source, source.num_prompts) for source in before.sources] == [("sums", 4), ("more", 3)]
    assert 0 < before.accuracy < 1
    assert before.replace(policy_version=1) != after


def test_several_workers_report_the_same_bit_for_bit_even_if_one_dies(reports: tuple[Reports, list[str]]) -> None:
    found, messages = reports
    assert found.by_both == found.by_the_survivor == found.by_one
    assert found.held == [1, 1]  # both lived through the evaluation, which gave them its weights
    assert any("is lost, other workers take over its work" in message for message in messages)
