"""What a resumed run does again, as a table: of all states of a step's ledger, and of all that may have changed since.

The tasks are the step's own as far as the ledger goes: names, decorators, keys, serializer and storage. Their bodies
only note that they ran, so that no worker is needed. Real kills are in tests/end_to_end/test_kill.py.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.recovery import resumed_step
from flows.train import ledger_storage
from infra.storage.ledger import update_key
from infra.storage.runs import RunDirectory
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import SYNCED, stage
from tests.support.configs import run_config
from tests.support.workplace import Workplace

STAGES = ("rollout", "put", "logprob", "reference", "advantage", "update")
COMMITTED = range(len(STAGES) + 1)  # how many stages a killed driver has committed


def as_before(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Go on as before: another driver with the same workers."""
    return run, policy


def with_other_limits(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Change what may be changed and no result depends on."""
    config = run.config
    runtime, rollout = config.runtime.replace(num_threads=7), config.rollout.replace(num_workers=2)
    return run.replace(config=config.replace(steps=99, runtime=runtime, rollout=rollout)), policy


def with_a_new_policy_group(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Lose the policy's ranks, and with them an update that no checkpoint has."""
    return run, policy.replace(incarnation="second")


def with_other_micro_batches(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Change a setting that log-probs and plans depend on, but no sample."""
    return run.replace(config=run.config.replace(packing=run.config.packing.replace(token_budget=999))), policy


def with_a_new_store(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Lose the column store, and with it all columns."""
    return run.replace(store_incarnation="second"), policy


def in_the_next_step(run: RunHandle, policy: PolicyHandle) -> tuple[RunHandle, PolicyHandle]:
    """Go on with another step, of which nothing is committed."""
    return run, policy.replace(version=policy.version + 1)


# The first stage that is run again whatever is committed, after each change.
CHANGES: dict[Callable[..., tuple[RunHandle, PolicyHandle]], str] = {
    as_before: "",
    with_other_limits: "",
    with_a_new_policy_group: "update",
    with_other_micro_batches: "logprob",
    with_a_new_store: "rollout",
    in_the_next_step: "rollout",
}


@pytest.fixture(scope="module", autouse=True)
def server(workplace: Workplace) -> Iterator[None]:
    """Prefect's server, which the flows of this module use."""
    workplace.services.start(prefect=True, ray=False)
    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunHandle:
    directory = RunDirectory.create(run_config(tmp_path), "demo")
    return RunHandle(
        run_id="demo", identity="demo", directory=directory.url, config=directory.config(), store_incarnation="first"
    )


POLICY = PolicyHandle(run_id="demo", version=3, incarnation="first")


async def stages_run(*steps: tuple[RunHandle, PolicyHandle, int]) -> list[list[str]]:
    """Run the first stages of steps of a run, so many of each, in a flow; return those not taken from the ledger."""
    ran: list[list[str]] = []

    def note(name: str) -> Any:
        async def body(run: RunHandle, policy: PolicyHandle) -> PolicyHandle:
            ran[-1].append(name)
            return policy.replace(incarnation="result")

        return stage(name, **({"key": update_key} if name == "update" else {}))(body)

    storage = await ledger_storage(RunDirectory.of(steps[0][0]))
    tasks = [note(name) for name in STAGES]

    @flow(persist_result=False, validate_parameters=False, result_storage=storage)
    async def all_steps() -> None:
        for run, policy, last in steps:
            ran.append([])
            for task in tasks[:last]:
                assert await task(run, policy) == policy.replace(incarnation="result")

    await all_steps()
    return ran


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_run_again(run: RunHandle, change: Callable[..., tuple[RunHandle, PolicyHandle]]) -> None:
    async def states() -> None:
        policies = [POLICY.replace(version=10 * number) for number in COMMITTED]  # each state in a step of its own
        committed = await stages_run(*((run, policy, number) for number, policy in enumerate(policies)))
        assert committed == [list(STAGES[:number]) for number in COMMITTED]
        first = STAGES.index(CHANGES[change]) if CHANGES[change] else len(STAGES)
        changed = [(*change(run, policy), len(STAGES)) for policy in policies]
        assert await stages_run(*changed) == [list(STAGES[min(number, first) :]) for number in COMMITTED]
        assert await stages_run(changed[0], changed[-1]) == [[], []]  # once

    asyncio.run(states())


def test_a_damaged_entry_is_run_again(run: RunHandle) -> None:
    """Prefect writes an entry in place, and may be killed meanwhile."""
    steps = [(run, POLICY.replace(version=number), len(STAGES)) for number in range(len(STAGES))]

    async def main() -> None:
        await stages_run(*steps)
        for number, damaged in enumerate(STAGES):
            folder = Path(RunDirectory.of(run).ledger.place) / f"step-{number:06d}"
            (entry,) = folder.glob(f"{damaged}-*")
            entry.write_bytes(entry.read_bytes()[:20])
        assert await stages_run(*steps) == [[damaged] for damaged in STAGES]

    asyncio.run(main())


def test_an_entry_is_synced_before_the_next_stage_begins(run: RunHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure may keep those of later stages and lose the one that they rest on."""
    synced: list[str] = []
    ledger, fsync = Path(RunDirectory.of(run).ledger.place), os.fsync

    def noted_fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        if path.is_relative_to(ledger):
            name = path.name.split("-")[0] if path.is_file() else str(path.relative_to(ledger.parent))
            synced.append(name if path.is_dir() or path.stat().st_size else "too early")
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    names = [each for stage in SYNCED for each in (stage, "ledger/step-000003", "ledger")]
    for again in (False, True):  # an entry of a driver that was killed may not be synced yet
        assert asyncio.run(stages_run((run, POLICY, len(STAGES)))) == [[] if again else list(STAGES)]
        assert synced == names
        synced.clear()


@pytest.mark.parametrize(("num_finished", "version", "is_planned"), product(range(4), range(6), (False, True)))
def test_where_a_run_goes_on(num_finished: int, version: int, is_planned: bool) -> None:
    step = resumed_step(num_finished, version, is_planned)
    if version <= num_finished:  # a checkpoint's: steps after it are repeated
        assert step == version
    elif version == num_finished + 1 and is_planned:  # the driver died between the update and the step's line
        assert step == num_finished
    else:
        assert step is None
