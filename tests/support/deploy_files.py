"""The files in `deploy/`, as the tools that read them see them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SECRETS = {
    name: f"{name.lower()}-of-a-test"
    for name in ("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "RAY_AUTH_TOKEN", "MINIO_PASSWORD")
}

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def compose(variables: Mapping[str, str], name: str = "compose.yaml") -> dict[str, Any]:
    """Read a compose file with its variables replaced, as Compose does.

    Raises:
        LookupError: A required variable is missing or empty.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if variables.get(name):
            return variables[name]
        if kind != "-":
            raise LookupError(f"{name}: {text}")
        return str(text)

    found: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(value, (DEPLOY / name).read_text()))
    return found


def manifests() -> dict[str, dict[str, Any]]:
    """Return the Kubernetes objects, by file and kind and name, e.g. `rayjob.yaml RayJob sluice-train`."""
    return {
        f"{path.name} {found['kind']} {found['metadata']['name']}": found
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for found in yaml.safe_load_all(path.read_text())
    }


def pod_templates(value: object) -> list[dict[str, Any]]:
    """Return the pod templates in an object, wherever they are."""
    if isinstance(value, list):
        return [found for item in value for found in pod_templates(item)]
    if not isinstance(value, dict):
        return []
    own = [value["template"]] if "containers" in value.get("template", {}).get("spec", {}) else []
    return own + [found for item in value.values() for found in pod_templates(item)]


def pinned(package: str) -> str:
    """Return the version of a package in the lock file."""
    (version,) = re.findall(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)
