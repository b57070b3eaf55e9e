"""An approval that is asked for again while its flow run is paused, as after a drained node or a lost server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_run import make_small_run
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

# What asks is cancelled as soon as the run is paused; the second time, somebody answers.
ASKS = """
import asyncio, sys
from contextlib import suppress
from prefect import flow, get_client, resume_flow_run
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run
from rich.console import Console
from flows.lifecycle.exit import exit_process
from flows.lifecycle.session import prefect_session, run_flow
from flows.ui import approval
from infra.storage.runs import RunDirectory
from schemas.config.runtime import ServicesConfig
from schemas.step import RunHandle, StepReport

url, directory = sys.argv[1], RunDirectory(sys.argv[2])
approval.POLL_SECONDS = 0.2
config = directory.config()
limits = type(config.approval).model_validate({"when": ["reward < 1"]})
config = config.replace(approval=limits)
run = RunHandle(run_id="demo", identity="demo", directory=directory.url, config=config, store_incarnation="a")
report = StepReport(step=3, policy_version=4, metrics={"reward": 0.5, "tokens": 8.0}, seconds=1.0, seconds_by_phase={})

async def wait_paused(seen):
    async with get_client() as client:
        while True:
            state = (await client.read_flow_run(flow_run.id)).state
            if state.is_paused() and state.id != seen:
                with suppress(PrefectHTTPStatusError):  # its form is not there yet
                    await client.read_flow_run_input(flow_run.id, state.state_details.run_input_keyset["schema"])
                    return state.id
            await asyncio.sleep(0.1)

async def paused_or_ended(asking, seen):
    paused = asyncio.create_task(wait_paused(seen))
    await asyncio.wait({asking, paused}, return_when=asyncio.FIRST_COMPLETED)
    if asking.done():
        raise RuntimeError("it doesn't wait for an answer") from asking.exception()
    return await paused

@flow
async def ask():
    first = asyncio.create_task(approval.ask_for_approval(run, report))
    seen = await paused_or_ended(first, None)
    first.cancel()
    await asyncio.wait([first])
    again = asyncio.create_task(approval.ask_for_approval(run, report))
    await paused_or_ended(again, seen)
    answer = {"decision": "lower the learning rate", "learning_rate_factor": 0.25}
    await resume_flow_run(flow_run.id, run_input=answer)
    await again
    return "decided"

with prefect_session(ServicesConfig(prefect_api_url=url, ray_address="none"), Console()):
    print(run_flow(ask, config.services), flush=True)
exit_process(0)
"""


def test_a_paused_run_is_asked_again_and_goes_on_with_the_answer(workplace: Workplace, tmp_path: Path) -> None:
    directory, server = make_small_run(tmp_path), workplace.services
    server.start(prefect=True, ray=False)
    done = subprocess.run(
        [sys.executable, "-c", ASKS, str(server.prefect_api_url), directory.url],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "decided" in done.stdout, done.stdout + done.stderr
    assert directory.decisions.load()[3].lr_factor == 0.25
