"""What a step costs the Prefect API, counted: it doesn't grow with the number of rollout workers."""

from collections import Counter

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from tests.progress import wait_until
from tests.services import Workplace

pytestmark = pytest.mark.slow

# The command, which writes its requests to a file: one line each, in the order in which they were sent.
COUNTED_COMMAND = """
import os, re
import httpx

requests = open(os.environ["REQUESTS"], "w", buffering=1)

def recorded(send):
    def record(self, request):
        print(request.method, re.sub("[0-9a-f-]{36}", "ID", request.url.path), file=requests)
        return send(self, request)
    return record

httpx.HTTPTransport.handle_request = recorded(httpx.HTTPTransport.handle_request)
httpx.AsyncHTTPTransport.handle_async_request = recorded(httpx.AsyncHTTPTransport.handle_async_request)

from flows.cli import main as cli
cli.main()
"""
NEW_FLOW_RUN = "POST /api/flow_runs/"
OF_TIME = ("POST /api/logs/", "GET /api/flow_runs/ID")  # lines sent every few seconds, and the look for a cancellation
STEPS, STEP = 3, 1  # the step that is looked at is neither the first nor the last


def requests_of_step(workplace: Workplace, num_workers: int) -> Counter[str]:
    """Return the requests from the start of a step to the start of the next, by method and route."""
    run_id = f"workers-{num_workers}"
    path = workplace.folder / f"{run_id}.requests"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(workplace.environment, "REQUESTS", str(path))
        workplace.python(
            *("-P", "-c", COUNTED_COMMAND, "train", "tiny.toml", f"steps={STEPS}", "--run-id", run_id, "kl.coef=0"),
            *(f"rollout.num_workers={num_workers}", "rollout.batch_prompts=1", "eval.every_steps=1"),
            "eval.batch_prompts=1",
        )
    requests = path.read_text().splitlines()
    starts = [at for at, request in enumerate(requests) if request == NEW_FLOW_RUN][-STEPS:]
    own = requests[starts[STEP] : starts[STEP + 1]]
    return Counter(request for request in own if request not in OF_TIME)


def task_runs_of_step(workplace: Workplace, num_workers: int) -> Counter[str]:
    """Return the step's task runs by the task's name."""
    chosen = FlowRunFilter(name=FlowRunFilterName(any_=[f"workers-{num_workers}/step-{STEP:04d}"]))

    async def ask(client: PrefectClient) -> Counter[str]:
        return Counter(run.name.rpartition("-")[0] for run in await client.read_task_runs(flow_run_filter=chosen))

    wait_until(lambda: workplace.ask(ask)["publish"] > 0)  # the server records them with a delay
    return workplace.ask(ask)


def test_a_step_costs_the_same_for_one_and_four_rollout_workers(workplace: Workplace) -> None:
    one, four = (requests_of_step(workplace, num_workers) for num_workers in (1, 4))
    assert one[NEW_FLOW_RUN] == 1
    assert four == one
    tasks = task_runs_of_step(workplace, 1)
    assert {"rollout", "put", "advantage", "update", "publish"} == set(tasks)
    assert task_runs_of_step(workplace, 4) == tasks
