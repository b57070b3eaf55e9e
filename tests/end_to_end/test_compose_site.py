"""The site of the compose file, on loopback: it trains, runs what the Prefect UI starts, and refuses strangers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.support.configs import config_toml
from tests.support.deploy_commands import parse
from tests.support.deploy_files import DEPLOY, SECRETS, compose
from tests.support.progress import wait_until
from tests.support.site_on_loopback import Site
from tests.support.tiny import make_tiny_data, make_tiny_model

pytestmark = pytest.mark.extended

SERVICES: dict[str, dict[str, Any]] = compose(SECRETS)["services"]
EVENTS = """
import asyncio
from prefect import get_client

async def ask():
    async with get_client() as client:
        own = {"filter": {"event": {"prefix": ["sluice."]}, "resource": {"id": ["sluice.run.from-the-ui"]}}}
        answer = await client.request("POST", "/events/filter", json=own)
        print(*sorted({event["event"] for event in answer.json()["events"]}))

asyncio.run(ask())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The compose file's services on loopback, with SQLite for PostgreSQL and moto for MinIO."""
    made = Site(tmp_path_factory.mktemp("site") / "data", [name for name in SERVICES if name != "postgres"])
    try:
        serve = ["python", "-m", "moto.server", "-H", made.addresses["minio"], "-p", "9000"]
        started = [made.start(serve, {}, "minio.log"), start(made, "prefect"), start(made, "ray-head")]
        wait_until(lambda: "Ray runtime started" in log(made, "ray-head") or any(each.poll() for each in started))
        made.run(SERVICES["ray-head"]["healthcheck"]["test"][1:], environment("ray-head"), "health.log")
        start(made, "ray-worker")
        check = SERVICES["prefect"]["healthcheck"]["test"][1:]
        wait_until(lambda: made.start(check, {}, "health.log").wait() == 0 or any(each.poll() for each in started))
        made.run(SERVICES["bucket"]["command"], environment("bucket"), "bucket.log")
        driver = start(made, "driver")
        ready = ("Ray runtime started", "Worker 'ProcessWorker")
        wait_until(lambda: all(line in log(made, "driver") for line in ready) or driver.poll() is not None)
        assert [each.poll() for each in (*started, driver)] == [None] * 4, log(made, "driver")
        yield made
    finally:
        made.close()


def start(site: Site, name: str) -> Any:
    """Start a service; Ray gets the address that the container would have, and ports that its neighbours leave free."""
    own = [f"--node-ip-address={site.addresses[name]}", "--dashboard-agent-listen-port=0"]
    own += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1"] if name == "ray-worker" else []
    command = SERVICES[name]["command"]
    return site.start(command + own if "ray" in command else command, environment(name), f"{name}.log")


def environment(name: str) -> Mapping[str, str]:
    given = SERVICES[name]["environment"]
    own = {"PREFECT_HOME": ".prefect", "HF_HOME": ".huggingface"}
    return {key: value for key, value in given.items() if "DATABASE" not in key} | own


def log(site: Site, name: str) -> str:
    return (site.folder / f"{name}.log").read_text()


def test_the_quickstart_trains_with_columns_and_checkpoints_in_s3(site: Site) -> None:
    lines = (DEPLOY / "compose.yaml").read_text().replace(" \\\n#  ", "").splitlines()
    (quickstart,) = [line.split("exec driver ")[1] for line in lines if "exec driver" in line]
    parse(quickstart.split())
    printed = site.run([*quickstart.split(), "--tiny"], environment("driver"), "demo.log")
    assert "step   2/2" in printed
    listing = ["python", "-c", "import s3fs; print(s3fs.S3FileSystem().find('sluice'))"]
    objects = yaml.safe_load(site.run(listing, environment("driver"), "objects.log"))
    assert [path for path in objects if "checkpoints/" in path and path.endswith(".safetensors")]
    assert [path for path in objects if "columns/" in path and path.endswith(".arrow")]


def test_the_prefect_worker_runs_what_the_ui_starts(site: Site) -> None:
    make_tiny_model(site.folder / "model")
    make_tiny_data(site.folder / "train.parquet", 8)
    rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8}
    services = {"ray_address": "ray-head:6379"}
    (site.folder / "tiny.toml").write_text(config_toml(name="tiny", steps=1, rollout=rollout, services=services))
    site.run(["sluice", "deploy", "tiny.toml", "--pool", "sluice"], environment("driver"), "deploy.log")
    watch = ["prefect", "deployment", "run", "train/tiny", "--param", "run_id=from-the-ui", "--watch"]
    site.run(watch, environment("driver"), "run.log")
    assert (site.folder / "runs" / "from-the-ui" / "summary.json").exists()

    def events() -> str:
        return site.run(["python", "-c", EVENTS], environment("driver"), "events.log")

    wait_until(lambda: "sluice.run.ended" in events())  # they went through the login, and are recorded with a delay
    assert "sluice.run.started sluice.step.completed" in events()


def test_a_stranger_is_refused(site: Site) -> None:
    stranger = {**environment("driver"), "RAY_AUTH_TOKEN": "x" * 32, "PREFECT_API_AUTH_STRING": "sluice:guess"}
    status = site.start(["ray", "status", "--address=ray-head:6379"], stranger, "stranger.log")
    wait_until(lambda: status.poll() is not None)
    assert status.returncode != 0
    assert "Active:" not in log(site, "stranger")
    train = ["sluice", "train", "tiny.toml"]
    printed = site.run(train, stranger, "stranger.log", exit_code=2)
    assert "refuses the login; set PREFECT_API_AUTH_STRING" in printed


def test_the_driver_s_machine_ends_with_its_ray_node(site: Site) -> None:
    own = re.compile(rf"\S+/raylet .*--node_ip_address={site.addresses['driver']} ")
    (raylet,) = [process for process, command in site.processes().items() if own.match(command)]
    raylet.kill()
    wait_until(lambda: not [command for command in site.processes().values() if "worker start" in command])
    assert "Ray or the Prefect worker has ended" in log(site, "driver")
