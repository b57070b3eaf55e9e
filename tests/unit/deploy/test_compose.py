"""The compose files: what the specification and the programs in them require."""

import re
from typing import Any

import pytest

from infra.services.local import PREFECT_ENVIRONMENT
from tests.support.deploy_commands import is_read, parse
from tests.support.deploy_files import DEPLOY, ROOT, SECRETS, compose

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
    given = r'(PASSWORD|TOKEN|SECRET\w*): (?!"?\$\{\w+:(\?|-\}))'  # neither required nor optional and empty
    assert not [line for line in text.splitlines() if re.search(given, line)]


def test_leases_of_slots_outlive_the_server() -> None:
    server = SERVICES["prefect"]
    name = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    assert server["environment"][name] == PREFECT_ENVIRONMENT[name]
    assert server["volumes"] == [f"prefect:{server['environment']['PREFECT_HOME']}"]


def test_environment_variables_are_read() -> None:
    assert not {name for service in SERVICES.values() for name in service.get("environment", {}) if not is_read(name)}
