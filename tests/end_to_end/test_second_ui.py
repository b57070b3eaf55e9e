"""Prefect's V2 UI in a browser: a run's page, its artifacts and a deployment show what they should, without errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from tests.support.browser import Page, open_browser
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

RUN_ID, POOL, STEPS = "second-ui", "second-ui", 2
# Of the UI itself: pictures that it lacks, a question that the server refuses, and its own statistics.
OF_UI = "Failed to load resource"
SHOWN = {  # what the page of each artifact has
    "progress": ("2 of 2 steps", "groups/zero_variance"),
    "samples": ("samples of step", "response"),
    "trajectories": ("1: reward", "tokens sampled"),
    "eval": ("held-out accuracy", "mean@1"),
    "workers": ("policy-0", "127.0.0.1"),
    "summary": ("tokens per second", "report.html, on the driver's machine"),
}


@pytest.fixture(scope="module")
def address(workplace: Workplace) -> str:
    """The address of the UI of a server with a finished run and a deployment."""
    environment = 'environment={kind="class", path="tests.support.games:Asking", max_turn_tokens=12}'
    settings = ('reward={kind="environment"}', "rollout.max_response_tokens=60", f"steps={STEPS}")
    workplace.sluice("train", "tiny.toml", environment, *settings, "--run-id", RUN_ID)
    workplace.ask(lambda client: client.create_work_pool(WorkPoolCreate(name=POOL, type="process")))
    workplace.sluice("deploy", "tiny.toml", "--pool", POOL)
    return f"{str(workplace.services.prefect_api_url).removesuffix('/api')}/v2"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with open_browser(tmp_path) as page:
        yield page


def assert_shown(page: Page, url: str, *texts: str) -> None:
    """Open a page; assert that it comes to show the texts, raises nothing, and has no link that leads nowhere."""
    page.open(url)
    for text in texts:
        page.wait_for(f"document.body.innerText.includes({text!r})")
    assert [error for error in page.errors if not error.startswith(OF_UI)] == []
    assert page.evaluate("[...document.querySelectorAll('a:not([href])')].map(each => each.innerText)") == []


def test_a_run_s_page_has_its_steps_and_artifacts(workplace: Workplace, address: str, page: Page) -> None:
    async def find(client: PrefectClient) -> str:
        chosen = FlowRunFilter(name=FlowRunFilterName(any_=[RUN_ID]))
        (run,) = await client.read_flow_runs(flow_run_filter=chosen)
        return str(run.id)

    run = f"{address}/runs/flow-run/{workplace.ask(find)}"
    assert_shown(page, run, RUN_ID, "Completed", "workers:", f"step   {STEPS}/{STEPS}")
    keys = [f"{RUN_ID}-{name}" for name in SHOWN if name not in ("samples", "trajectories")]  # which are the steps'
    assert_shown(page, f"{run}?tab=Artifacts", *keys)
    assert_shown(page, f"{run}?tab=SubflowRuns", *(f"{RUN_ID}/step-{step:04d}" for step in range(STEPS)))


def test_every_artifact_is_shown(workplace: Workplace, address: str, page: Page) -> None:
    artifacts = workplace.ask(lambda client: client.read_artifacts())
    found = {artifact.key: artifact.id for artifact in artifacts if str(artifact.key).startswith(f"{RUN_ID}-")}
    assert set(found) == {f"{RUN_ID}-{name}" for name in SHOWN}
    for name, texts in SHOWN.items():
        assert_shown(page, f"{address}/artifacts/artifact/{found[f'{RUN_ID}-{name}']}", f"{RUN_ID}-{name}", *texts)
        if name == "progress":
            page.wait_for("document.querySelector('img[src^=\"data:image/svg\"]')?.naturalWidth > 0")


def test_a_deployment_s_page_has_its_parameters(workplace: Workplace, address: str, page: Page) -> None:
    (deployment,) = [each for each in workplace.ask(lambda client: client.read_deployments()) if each.name == "tiny"]
    assert_shown(page, f"{address}/deployments/deployment/{deployment.id}", "tiny", "train", POOL)
    assert_shown(page, f"{address}/deployments/deployment/{deployment.id}?tab=Parameters", "tiny.toml")
