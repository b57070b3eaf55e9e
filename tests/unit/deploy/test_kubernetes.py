"""The Kubernetes manifests: their form, and that what they refer to exists."""

import copy
import re
import shlex
from typing import Any

import pytest

from infra.services.local import PREFECT_ENVIRONMENT
from tests.support.deploy_commands import is_read, parse
from tests.support.deploy_files import DEPLOY, ROOT, SECRETS, compose, manifests, pinned, pod_templates
from tests.unit.deploy.kubernetes import faults

OBJECTS = manifests()
PART_OF = {"app.kubernetes.io/part-of": "sluice"}
UNITS = {"": 1, "Gi": 2**30, "Ti": 2**40}
PODS = [template for found in OBJECTS.values() for template in pod_templates(found)]
RAY = [
    found.get("rayClusterSpec", found)
    for found in (each["spec"] for each in OBJECTS.values() if each["apiVersion"] == "ray.io/v1")
]
GROUPS = [group for cluster in RAY for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]

ENTRYPOINT = shlex.split(OBJECTS["rayjob.yaml RayJob sluice-train"]["spec"]["entrypoint"])


@pytest.mark.parametrize("name", OBJECTS)
def test_the_schemas_allow_it(name: str) -> None:
    assert faults(OBJECTS[name]) == []


def test_what_the_schemas_do_not_allow_is_found() -> None:
    wrong = copy.deepcopy(OBJECTS["raycluster.yaml RayCluster sluice"])
    wrong["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "sluice"
    wrong["spec"]["workerGroupSpecs"][0]["replicas"] = "8"
    del wrong["spec"]["workerGroupSpecs"][1]["groupName"]
    found = faults(wrong)
    assert [fault.split(": ")[1].split(" is")[0] for fault in found] == ["unknown imagee", "'8'", "no groupName"]


def test_pods_mount_what_they_have() -> None:
    claims = {found["metadata"]["name"] for found in OBJECTS.values() if found["kind"] == "PersistentVolumeClaim"}
    templates = {
        each["metadata"]["name"] for found in OBJECTS.values() for each in found["spec"].get("volumeClaimTemplates", [])
    }
    for pod in PODS:
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            assert (
                {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | templates
                if "volumeMounts" in container
                else True
            )
        assert {
            each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each
        } <= claims


def test_the_image_s_user_gets_the_mount() -> None:
    (user,) = re.findall(r"useradd .*--uid (\d+) sluice", (DEPLOY / "Dockerfile").read_text())
    (owner,) = OBJECTS["prefect.yaml Deployment prefect"]["spec"]["template"]["spec"]["initContainers"]
    shell, option, script = owner["command"]
    assert (shell, option) == ("sh", "-c")
    assert script == f'[ "$(stat -c %u /data)" = {user} ] || chown {user}:{user} /data'
    assert owner["volumeMounts"] == [{"name": "shared", "mountPath": "/data"}]  # the whole, no subPath


def test_memory_is_bounded_and_shared_memory_is_within_it() -> None:
    for pod in PODS:
        (container,) = pod["spec"]["containers"]
        limit = num_bytes(container["resources"]["limits"]["memory"])
        shared = [
            num_bytes(each["emptyDir"]["sizeLimit"]) for each in pod["spec"].get("volumes", []) if "emptyDir" in each
        ]
        assert sum(shared) <= limit / 2


def test_services_find_their_pods_and_ports() -> None:
    for found in (each for each in OBJECTS.values() if each["kind"] == "Service"):
        (pod,) = [each for each in PODS if found["spec"]["selector"].items() <= each["metadata"]["labels"].items()]
        ports = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["port"] for port in found["spec"]["ports"]} <= ports
    for found in (each for each in OBJECTS.values() if "selector" in each["spec"] and "template" in each["spec"]):
        assert (
            found["spec"]["selector"]["matchLabels"].items() <= found["spec"]["template"]["metadata"]["labels"].items()
        )


def test_probes_ask_a_port_that_the_container_has() -> None:
    for pod in PODS:
        for container in pod["spec"]["containers"]:
            asked = [
                container[probe]["httpGet"]["port"]
                for probe in ("readinessProbe", "livenessProbe")
                if "httpGet" in container.get(probe, {})
            ]
            assert set(asked) <= {port["name"] for port in container.get("ports", [])}


def test_hosts_in_the_environment_are_services() -> None:
    services = {found["metadata"]["name"] for found in OBJECTS.values() if found["kind"] == "Service"}
    for variable in variables():
        host = re.match(r"http://([a-z-]+):", variable.get("value", ""))
        assert host is None or host.group(1) in services
        assert not variable["name"].endswith("_HOST") or variable["value"] in services


def test_secrets_are_made_by_the_documented_command_and_never_written_down() -> None:
    text = (DEPLOY / "kubernetes" / "prefect.yaml").read_text()
    assert "kubectl create secret generic sluice " in text
    made = set(re.findall(r"--from-literal=([\w-]+)=", text))
    refs = [variable["valueFrom"]["secretKeyRef"] for variable in variables() if "valueFrom" in variable]
    assert {(ref["name"], ref["key"]) for ref in refs} == {("sluice", key) for key in made}
    assert not [
        each for each in variables() if re.search("PASSWORD|TOKEN|AUTH_STRING|SECRET", each["name"]) and "value" in each
    ]


def test_environment_variables_are_read() -> None:
    assert not {variable["name"] for variable in variables() if not is_read(variable["name"])}


def test_leases_of_slots_outlive_the_server() -> None:
    (server,) = OBJECTS["prefect.yaml Deployment prefect"]["spec"]["template"]["spec"]["containers"]
    values = {variable["name"]: variable.get("value") for variable in server["env"]}
    name = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
    assert values[name] == PREFECT_ENVIRONMENT[name]
    assert [mount["mountPath"] for mount in server["volumeMounts"]] == [values["PREFECT_HOME"]]


def test_no_other_pod_may_connect_and_ray_asks_for_a_token() -> None:
    policy = OBJECTS["prefect.yaml NetworkPolicy sluice"]["spec"]
    assert policy["podSelector"]["matchLabels"] == PART_OF
    admitted = [source["podSelector"]["matchLabels"] for rule in policy["ingress"] for source in rule["from"]]
    jobs = [name.split()[-1] for name in OBJECTS if " RayJob " in name]  # of each, another pod submits its command
    assert jobs
    scraped = [
        port["port"] for rule in policy["ingress"] if "prometheus" in str(rule["from"]) for port in rule["ports"]
    ]
    ports = [port for group in GROUPS for port in group["template"]["spec"]["containers"][0].get("ports", [])]
    assert {port["containerPort"] for port in ports if port["name"] == "metrics"} == set(scraped)
    assert all({"batch.kubernetes.io/job-name": job} in admitted for job in jobs)
    assert all(pod["metadata"]["labels"].items() >= PART_OF.items() for pod in PODS)
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in PODS)
    assert all(cluster["authOptions"] == {"mode": "token"} for cluster in RAY)


def test_versions_are_those_of_the_lock_file() -> None:
    assert {cluster["rayVersion"] for cluster in RAY} == {pinned("ray")}
    images = {each["image"] for pod in PODS for each in pod["spec"]["containers"]}
    variables = dict.fromkeys(("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "RAY_AUTH_TOKEN", "MINIO_PASSWORD"), "x")
    services = compose(variables | {"SLUICE_STAGE": "engine"})["services"]
    assert images <= {service["image"] for service in services.values()} | {"sluice:trainer"}
    assert services["prefect"]["image"].startswith(f"prefecthq/prefect:{pinned('prefect')}-")


def test_ray_is_started_with_its_own_options() -> None:
    for group in GROUPS:
        parse(["ray", "start", "--block", *(f"--{name}={value}" for name, value in group["rayStartParams"].items())])
        (container,) = group["template"]["spec"]["containers"]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu")
        assert (gpus is None) == (group["rayStartParams"].get("num-gpus") == "0")
    (driver,) = [group["template"] for group in GROUPS if group.get("groupName") == "driver"]
    assert driver["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (container,) = driver["spec"]["containers"]
    assert container["args"][0].endswith("exec driver $KUBERAY_GEN_RAY_START_CMD")
    assert "deploy/driver.sh /usr/local/bin/driver" in (DEPLOY / "Dockerfile").read_text()


def test_the_job_s_commands_parse() -> None:
    shell, option, script = ENTRYPOINT
    assert (shell, option) == ("bash", "-c")
    (command,) = re.findall(r"exec (sluice .+)", script.replace("$RAY_ADDRESS", "10.0.0.1:6379"))
    assert parse(command.split())["resumes"]  # on a further cluster, wherever the config has its runs


def test_documented_deployments_are_of_the_cluster_s_ray() -> None:
    """Without its address, a run would start a Ray of its own in the driver's pod, which has no GPU."""
    texts = [path.read_text() for path in (ROOT / "docs" / "cluster.md", *DEPLOY.glob("**/*.yaml"))]
    found = re.findall(r"sluice deploy [^\n`]*", re.sub(r"\\\n#? *", " ", "\n".join(texts)))
    heads = {f"services.ray_address={name}:6379" for name in (*compose(SECRETS)["services"], "sluice-head-svc")}
    assert [parse(command.split())["pool"] for command in found] == ["sluice"] * 3
    assert [len(heads & {*command.split()}) for command in found] == [1] * 3


def variables() -> list[dict[str, Any]]:
    return [variable for pod in PODS for each in pod["spec"]["containers"] for variable in each.get("env", [])]


def num_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]
