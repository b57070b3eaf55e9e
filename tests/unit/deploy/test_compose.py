"""The compose files: what the specification and the programs in them require, and the whole site on loopback."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.support.configs import config_toml
from tests.support.progress import wait_until
from tests.support.tiny import make_tiny_data, make_tiny_model
from tests.unit.deploy.commands import is_read, parse
from tests.unit.deploy.files import DEPLOY, ROOT, SECRETS, compose
from tests.unit.deploy.site_on_loopback import Site

CUDA = "compose.cuda.yaml"
# Of the Compose specification's schema (compose-spec.json): the keys that are used here, and what they hold.
TOP = {"name", "services", "volumes", "x-sluice"}
SERVICE: dict[str, type | tuple[type, ...]] = {
    "image": str,
    "build": dict,
    "command": list,
    "environment": dict,
    "volumes": list,
    "ports": list,
    "depends_on": dict,
    "healthcheck": dict,
    "restart": str,
    "shm_size": str,
    "init": bool,
    "deploy": dict,
    "stop_grace_period": str,
}
HEALTHCHECK = {"test", "interval", "retries"}
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
RESTART = {"no", "always", "on-failure", "unless-stopped"}
SIZE, SECONDS = re.compile(r"\d+(b|kb|mb|gb)"), re.compile(r"\d+s")

SERVICES: dict[str, dict[str, Any]] = compose(SECRETS)["services"]
OWN = ("bucket", "ray-head", "ray-worker", "driver")  # in Sluice's image


@pytest.mark.parametrize("name", ["compose.yaml", CUDA])
def test_the_specification_allows_it(name: str) -> None:
    found = compose(SECRETS, name)
    assert found.keys() <= TOP
    for service in found["services"].values():
        for key, value in service.items():
            assert isinstance(value, SERVICE[key]), key
        assert SIZE.fullmatch(service.get("shm_size", "1gb"))
        assert service.get("restart", "no") in RESTART
        assert all(isinstance(value, str) for value in service.get("environment", {}).values())
        assert all(isinstance(word, str) for word in service.get("command", []))
        if check := service.get("healthcheck"):
            assert check.keys() == HEALTHCHECK
            assert check["test"][0] == "CMD"
            assert SECONDS.fullmatch(check["interval"])


def test_what_services_refer_to_is_there() -> None:
    found = compose(SECRETS)
    for service in SERVICES.values():
        assert {mount.split(":")[0] for mount in service.get("volumes", [])} <= found["volumes"].keys()
        for other, dependency in service.get("depends_on", {}).items():
            assert dependency["condition"] in CONDITIONS
            assert dependency["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]
        named = re.findall(r"(?:http://|--address=)([\w-]+):\d+", str(service))
        assert set(named) <= SERVICES.keys()
    for name in OWN:
        build = SERVICES[name]["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).exists()
        assert set(build["args"]) <= set(
            re.findall(r"^ARG (\w+)", (ROOT / build["dockerfile"]).read_text(), re.MULTILINE)
        )
    assert compose(SECRETS, CUDA)["services"].keys() <= SERVICES.keys()


@pytest.mark.parametrize("name", ["prefect", "ray-head", "ray-worker", "driver"])
def test_commands_parse(name: str) -> None:
    parse(SERVICES[name]["command"])


def test_only_the_prefect_ui_is_published_and_on_loopback() -> None:
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "prefect": ["127.0.0.1:4200:4200"]
    }


def test_every_secret_is_required_and_in_the_example() -> None:
    for missing in SECRETS:
        with pytest.raises(LookupError, match=missing):
            compose({**SECRETS, missing: ""})
    example = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    assert [example[name] for name in SECRETS] == [""] * len(SECRETS)
    assert "deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()
    text = "".join((DEPLOY / name).read_text() for name in ("compose.yaml", CUDA))
    assert set(re.findall(r"\$\{(\w+)", text)) == example.keys()
    assert not [line for line in text.splitlines() if re.search(r"(PASSWORD|TOKEN|SECRET\w*): (?!\$\{\w+:\?)", line)]


def test_environment_variables_are_read() -> None:
    assert not {name for service in SERVICES.values() for name in service.get("environment", {}) if not is_read(name)}


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
    return {key: value for key, value in given.items() if "DATABASE" not in key} | {"PREFECT_HOME": ".prefect"}


def log(site: Site, name: str) -> str:
    return (site.folder / f"{name}.log").read_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_prefect_worker_runs_what_the_ui_starts(site: Site) -> None:
    make_tiny_model(site.folder / "model")
    make_tiny_data(site.folder / "train.parquet", 8)
    rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8}
    own = {"num_threads": 1, "ray_address": "ray-head:6379"}
    (site.folder / "tiny.toml").write_text(config_toml(name="tiny", steps=1, rollout=rollout, runtime=own))
    site.run(["sluice", "deploy", "tiny.toml", "--pool", "sluice"], environment("driver"), "deploy.log")
    watch = ["prefect", "deployment", "run", "train/tiny", "--param", "run_id=from-the-ui", "--watch"]
    site.run(watch, environment("driver"), "run.log")
    assert (site.folder / "runs" / "from-the-ui" / "summary.json").exists()


@pytest.mark.slow
def test_a_stranger_is_refused(site: Site) -> None:
    stranger = {**environment("driver"), "RAY_AUTH_TOKEN": "x" * 32, "PREFECT_API_AUTH_STRING": "sluice:guess"}
    status = site.start(["ray", "status", "--address=ray-head:6379"], stranger, "stranger.log")
    wait_until(lambda: status.poll() is not None)
    assert status.returncode != 0
    assert "Active:" not in log(site, "stranger")
    train = ["sluice", "train", "tiny.toml"]
    printed = site.run(train, stranger, "stranger.log", exit_code=2)
    assert "refuses the login; set PREFECT_API_AUTH_STRING" in printed


@pytest.mark.slow
def test_the_driver_s_machine_ends_with_its_ray_node(site: Site) -> None:
    own = re.compile(rf"\S+/raylet .*--node_ip_address={site.addresses['driver']} ")
    (raylet,) = [process for process, command in site.processes().items() if own.match(command)]
    raylet.kill()
    wait_until(lambda: not [command for command in site.processes().values() if "worker start" in command])
    assert "Ray or the Prefect worker has ended" in log(site, "driver")
