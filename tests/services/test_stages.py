"""What a resumed run does again, as a table: of all states of a step's ledger, and of all that may have changed since.

The tasks are the step's own as far as the ledger goes: names, decorators, keys, serializer and storage. Their bodies
only note that they ran, so that no worker is needed. Real kills are in tests/end_to_end/test_kill.py.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.ledger_storage import ledger_storage
from flows.recovery import resumed_step
from infra.storage.runs import RunDirectory
from schemas.step import PolicyHandle, RunHandle
from tasks.stage import stage, update_cache_key
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


async def stages_run(run: RunHandle, policy: PolicyHandle, last: int = len(STAGES)) -> list[str]:
    """Run a step's first `last` stages in a flow; return those that weren't taken from the ledger."""
    ran: list[str] = []

    def note(name: str) -> Any:
        async def body(run: RunHandle, policy: PolicyHandle) -> PolicyHandle:
            ran.append(name)
            return policy.replace(incarnation="result")

        return stage(name, **({"key": update_cache_key} if name == "update" else {}))(body)

    @flow(persist_result=False, validate_parameters=False, result_storage=await ledger_storage(RunDirectory.of(run)))
    async def step() -> None:
        for name in STAGES[:last]:
            assert await note(name)(run, policy) == policy.replace(incarnation="result")

    await step()
    return ran


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_run_again(run: RunHandle, change: Callable[..., tuple[RunHandle, PolicyHandle]]) -> None:
    async def states() -> None:
        for number, committed in enumerate(COMMITTED):
            policy = POLICY.replace(version=10 * number)  # each state in a step of its own
            assert await stages_run(run, policy, committed) == list(STAGES[:committed])
            first = STAGES.index(CHANGES[change]) if CHANGES[change] else len(STAGES)
            changed = change(run, policy)
            assert await stages_run(*changed) == list(STAGES[min(committed, first) :])
            assert await stages_run(*changed) == []  # once

    asyncio.run(states())


@pytest.mark.parametrize("damaged", STAGES)
def test_a_damaged_entry_is_run_again(run: RunHandle, damaged: str) -> None:
    """Prefect writes an entry in place, and may be killed meanwhile."""

    async def main() -> None:
        await stages_run(run, POLICY)
        folder = Path(RunDirectory.of(run).ledger.place) / "step-000003"
        (entry,) = folder.glob(f"{damaged}-*")
        entry.write_bytes(entry.read_bytes()[:20])
        assert await stages_run(run, POLICY) == [damaged]

    asyncio.run(main())


@pytest.mark.parametrize(("num_finished", "version", "is_planned"), product(range(4), range(6), (False, True)))
def test_where_a_run_goes_on(num_finished: int, version: int, is_planned: bool) -> None:
    step = resumed_step(num_finished, version, is_planned)
    if version <= num_finished:  # a checkpoint's: steps after it are repeated
        assert step == version
    elif version == num_finished + 1 and is_planned:  # the driver died between the update and the step's line
        assert step == num_finished
    else:
        assert step is None
