"""The assets of a run on a real Prefect server: what is materialized, of what, and with which metadata."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import Flow, State
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.deployments.entrypoints import evaluate, export, prepare_data
from infra.checkpoints.store import open_checkpoints
from infra.storage.runs import RunDirectory
from tasks.assets import MAX_UPSTREAM, asset_at, checkpoints_of, trained_on
from tests.support.configs import run_config
from tests.support.progress import wait_until
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

RUN_ID, STEPS = "assets", 2
SUCCEEDED, FAILED = "prefect.asset.materialization.succeeded", "prefect.asset.materialization.failed"


@pytest.fixture(scope="module")
def printed(workplace: Workplace) -> str:
    """What a run of two steps has printed, whose driver is killed in the second and which is resumed."""
    driver = workplace.start("train", "tiny.toml", f"steps={STEPS}", "--run-id", RUN_ID)
    driver.wait_for(lambda: workplace.run(RUN_ID).metrics.steps())
    text = driver.kill()
    return text + workplace.sluice("resume", RUN_ID)


@pytest.fixture
def api(workplace: Workplace, printed: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(workplace.folder)
    with temporary_settings({PREFECT_API_URL: workplace.services.prefect_api_url}):
        yield


def materialized(place: Workplace, event: str = SUCCEEDED) -> dict[str, list[dict[str, Any]]]:
    """Return the materializations by asset, in the order of their time."""
    sent = {"filter": {"event": {"name": [event]}, "order": "ASC"}}
    page = place.ask(lambda client: client.request("POST", "/events/filter", json=sent)).json()
    found = defaultdict(list)
    while True:
        for each in page["events"]:
            found[each["resource"]["prefect.resource.id"]].append(each)
        if page["next_page"] is None:  # a page has 50 events: those of other files' runs may fill it
            return found
        following = page["next_page"].partition("/api")[2]
        page = place.ask(lambda client, path=following: client.request("GET", path)).json()


def made_of(event: dict[str, Any]) -> set[str]:
    return {each["prefect.resource.id"] for each in event["related"] if each["prefect.resource.role"] == "asset"}


def run(flow: Flow[..., Any], *arguments: Any, **parameters: Any) -> State[Any]:
    return asyncio.run(flow(*arguments, **parameters, return_state=True))


def wait_for(place: Workplace, key: str, step: int) -> list[dict[str, Any]]:
    """Return an asset's materializations, once there is that of a step: the server records them with a delay."""
    wait_until(lambda: any(event["payload"].get("step", step) == step for event in materialized(place)[key]))
    return materialized(place)[key]


def test_checkpoints_are_made_of_model_and_data(workplace: Workplace, printed: str) -> None:
    directory, folder = RunDirectory(workplace.folder / "runs" / RUN_ID), workplace.folder
    config = directory.config()
    events = wait_for(workplace, f"file://{directory.url}/policy", STEPS)
    assert [event["payload"]["step"] for event in events] == sorted({event["payload"]["step"] for event in events})
    last = events[-1]
    manifest = open_checkpoints(directory, config.checkpoint).read_manifest(STEPS)
    assert last["payload"] == {
        "run_id": RUN_ID,
        "step": STEPS,
        "accuracy": directory.metrics.evals()[-1].accuracy,
        "bytes": sum(file.num_bytes for file in manifest.files.values()),
        "digest": manifest.digest,
    }
    assert made_of(last) == {f"file://{folder}/model", f"file://{folder}/train.parquet"}
    assert "warning" not in printed.lower(), printed


def test_evaluations_are_made_of_weights_and_held_out_prompts(workplace: Workplace, printed: str) -> None:
    directory, folder = RunDirectory(workplace.folder / "runs" / RUN_ID), workplace.folder
    events = wait_for(workplace, f"file://{directory.url}/evaluation", STEPS)
    of_step = {event["payload"]["step"]: event for event in events}
    held_out = f"file://{folder}/eval.parquet"
    assert made_of(of_step[0]) == {f"file://{folder}/model", held_out}
    assert made_of(of_step[STEPS]) == {f"file://{directory.url}/policy", held_out}
    assert of_step[STEPS]["payload"]["accuracy"] == directory.metrics.evals()[-1].accuracy


def test_deployed_flows_materialize_what_they_write(workplace: Workplace, api: None) -> None:
    folder = workplace.folder
    policy = f"file://{folder}/runs/{RUN_ID}/policy"
    assert run(export, RUN_ID, "exported").is_completed()
    assert run(evaluate, RUN_ID, data_path="train.parquet", num_prompts=2).is_completed()
    exported = wait_for(workplace, f"file://{folder}/exported", STEPS)[-1]
    assert made_of(exported) == {policy}
    assert exported["payload"]["bytes"] == sum(file.stat().st_size for file in (folder / "exported").iterdir())
    key, data = f"file://{folder}/runs/{RUN_ID}/evaluation", f"file://{folder}/train.parquet"
    wait_until(lambda: any(made_of(event) == {policy, data} for event in materialized(workplace)[key]))

    state = run(export, RUN_ID, "exported")  # it is not empty any more
    assert "is not an empty folder" in state.message
    wait_until(lambda: materialized(workplace, FAILED)[f"file://{folder}/exported"])


def test_prepared_data_is_an_asset_that_checkpoints_are_made_of(workplace: Workplace, api: None) -> None:
    pytest.importorskip("reasoning_gym")
    assert run(prepare_data, "chain_sum", "sums.jsonl", size=3).is_completed()
    config = run_config(workplace.folder, data={"train_path": "sums.jsonl"})
    (event,) = wait_for(workplace, trained_on(config)[-1].key, 0)
    assert event["payload"]["rows"] == 3


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("s3://bucket/runs/", "s3://bucket/runs"),
        ("s3://KEY:SECRET@bucket/runs", "s3://bucket/runs"),
        ("https://token@host/data.jsonl?sig=SECRET", "https://host/data.jsonl"),
        ("simplecache::s3://bucket/a@b", "s3://bucket/a@b"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
        ("file:///data/a b#1", "file:///data/a=20b=231"),
        ("GIT+HTTPS://host/x", "githttps://host/x"),
    ],
)
def test_a_key_is_a_valid_url_without_secrets(place: str, key: str) -> None:
    assert asset_at(place).key == key


def test_a_long_path_or_many_sources_are_no_error() -> None:
    first, second = (asset_at(f"/data/{'x' * 600}{end}").key for end in "ab")
    assert first != second
    assert len(first) == 512
    sources = [{"path": f"{number}.jsonl"} for number in range(120)]
    config, directory = run_config(data={"train_path": None, "sources": sources}), RunDirectory("/runs/demo")
    assert len(trained_on(directory, config)) == MAX_UPSTREAM
    assert checkpoints_of(directory, config.checkpoint.replace(url="s3://b/c")).key == "s3://b/c/demo"
