"""The fields of Kubernetes' and KubeRay's objects that the manifests use, written down from the published schemas.

A dict lists the fields that an object may have, and `REQUIRED` those that it must have; a list holds the form of each
item; a type or a pattern is the form of a value.
"""

import re
from collections.abc import Iterator
from typing import Any

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTPE]i?)?")
MAP = {"*": str}

METADATA = {"name": NAME, "labels": MAP, "annotations": MAP}
ENV = {"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": NAME, "key": str, "optional": bool}}}
PROBE = {
    "exec": {"command": [str]},
    "httpGet": {"path": str, "port": (str, int)},
    "initialDelaySeconds": int,
}
CONTAINER = {
    "name": NAME,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [ENV],
    "envFrom": [{"secretRef": {"name": NAME, "optional": bool}}],
    "ports": [{"name": NAME, "containerPort": int}],
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "resources": {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}},
    "volumeMounts": [{"name": NAME, "mountPath": str, "subPath": str}],
}
VOLUME = {
    "name": NAME,
    "persistentVolumeClaim": {"claimName": NAME},
    "emptyDir": {"medium": re.compile("Memory"), "sizeLimit": QUANTITY},
}
POD = {
    "metadata": METADATA,
    "spec": {
        "initContainers": [CONTAINER],
        "containers": [CONTAINER],
        "volumes": [VOLUME],
        "tolerations": [{"key": str, "operator": re.compile("Exists|Equal"), "effect": re.compile("NoSchedule")}],
        "automountServiceAccountToken": bool,
        "enableServiceLinks": bool,
        "terminationGracePeriodSeconds": int,
    },
}
CLAIM = {"accessModes": [re.compile("ReadWrite(Once|Many)")], "resources": {"requests": {"storage": QUANTITY}}}
SELECTOR = {"matchLabels": MAP}
PEER = {"podSelector": SELECTOR, "namespaceSelector": {}}
GROUP = {"rayStartParams": MAP, "template": POD}
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": re.compile("token")},
    "headGroupSpec": GROUP,
    "workerGroupSpecs": [GROUP | {"groupName": NAME, "replicas": int, "minReplicas": int, "maxReplicas": int}],
}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("v1", "PersistentVolumeClaim"): CLAIM,
    ("v1", "Service"): {"selector": MAP, "ports": [{"name": NAME, "port": int}]},
    ("apps/v1", "Deployment"): {"replicas": int, "selector": SELECTOR, "template": POD},
    ("apps/v1", "StatefulSet"): {
        "replicas": int,
        "selector": SELECTOR,
        "template": POD,
        "serviceName": NAME,
        "volumeClaimTemplates": [{"metadata": METADATA, "spec": CLAIM}],
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "podSelector": SELECTOR,
        "policyTypes": [re.compile("Ingress")],
        "ingress": [{"from": [PEER], "ports": [{"protocol": re.compile("TCP"), "port": int}]}],
    },
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): {
        "entrypoint": str,
        "backoffLimit": int,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": CLUSTER,
    },
}
REQUIRED: dict[str, set[str]] = {
    "initContainers": {"name", "image"},
    "containers": {"name", "image"},
    "volumeMounts": {"name", "mountPath"},
    "env": {"name"},
    "headGroupSpec": {"template", "rayStartParams"},
    "workerGroupSpecs": {"groupName", "template", "rayStartParams", "replicas", "minReplicas", "maxReplicas"},
    "tolerations": {"operator"},
    "volumes": {"name"},
}


def faults(found: dict[str, Any]) -> list[str]:
    """Return what is wrong with the form of an object, one line each."""
    own = {"apiVersion": str, "kind": str, "metadata": METADATA, "spec": SPECS[found["apiVersion"], found["kind"]]}
    return list(_faults(found, own, found["kind"]))


def _faults(value: Any, form: Any, place: str) -> Iterator[str]:
    if isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{place}: not an object"
            return
        required = REQUIRED.get(place.rsplit(".", 1)[-1].split("[")[0], set())
        yield from (f"{place}: no {name}" for name in required - value.keys())
        for name, item in value.items():
            inner = form.get(name, form.get("*"))
            yield from [f"{place}: unknown {name}"] if inner is None else _faults(item, inner, f"{place}.{name}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{place}: not a list"
            return
        for at, item in enumerate(value):
            yield from _faults(item, form[0], f"{place}[{at}]")
    elif isinstance(form, re.Pattern):
        if not isinstance(value, str) or not form.fullmatch(value):
            yield f"{place}: {value!r} is not of the form {form.pattern}"
    elif not isinstance(value, form) or (form is int and isinstance(value, bool)):
        yield f"{place}: {value!r} is not a {form}"
