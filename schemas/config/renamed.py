"""Config keys of earlier versions: refused, with what to use now, but translated in the stored config of a run."""

from collections.abc import Iterator
from typing import Any

RENAMED = {
    "runtime.services_dir": "services.dir",
    "runtime.ray_address": "services.ray_address",
    "runtime.py_modules": "services.py_modules",
    "runtime.prefect_api_url": "services.prefect_api_url",
    "runtime.prefect_patience_seconds": "services.prefect_patience_seconds",
    "runtime.tls_certificate": "services.tls_certificate",
    "runtime.tls_key": "services.tls_key",
    "runtime.worker_timeout_seconds": "timeouts.worker_seconds",
    "runtime.collective_timeout_seconds": "timeouts.collective_seconds",
    "runtime.resource_timeout_seconds": "timeouts.resource_seconds",
    "runtime.orphan_seconds": "timeouts.driver_seconds",
    "runtime.weight_transport": "weights.transport",
    "runtime.weight_bucket_bytes": "weights.bucket_bytes",
    "runtime.weight_probe": "weights.probe",
    "runtime.approve_when": "approval.when",
    "runtime.queries": "approval.queries",
    "runtime.approve_failed_queries": "approval.on_failed_queries",
    "runtime.approval_timeout_seconds": "approval.timeout_seconds",
}
REMOVED = {  # and why
    "model.lora.dropout": "adapters have none, as a log-prob must be a function of weights and tokens",
    "rollout.speculative": "leave it out",
    "store.lease_seconds": "columns stay until their step is cleared, or without a driver for timeouts.driver_seconds",
    "runtime.gpus_per_worker": 'runtime.placement = "colocated" lets workers share GPUs',
    "runtime.tensorboard": 'monitors = [{ kind = "tensorboard" }] writes them',
}
VALUES = {  # by key, an old value and the one that replaces it
    "store.kind": ("ray", "shared"),
    "weights.transport": ("object_store", "shared_memory"),
}


def require_current_keys(given: Any) -> Any:
    """Return what a config is made of, if it has no key of an earlier version.

    Raises:
        ValueError: It has some; the message names them, and what to use instead.
    """
    problems = [f"{old} is now {new}" for old, new in RENAMED.items() if _table(given, old)]
    problems += [f"{old} was removed in 0.3: {reason}" for old, reason in REMOVED.items() if _table(given, old)]
    if problems:
        raise ValueError("; ".join(problems))
    return given


def translate(stored: dict[str, Any]) -> None:
    """Give a run's stored config, of this or an earlier version, the keys and values of this one.

    Args:
        stored: The config as a tree of plain values; it is changed.
    """
    for key, value in list(_pop_all(stored, (*RENAMED, *REMOVED))):
        if key in RENAMED:
            section, name = RENAMED[key].split(".")
            stored.setdefault(section, {})[name] = value
        elif key == "runtime.tensorboard" and value:
            stored["monitors"] = [*stored.get("monitors", ()), {"kind": "tensorboard"}]
    for key, (old, new) in VALUES.items():
        name = key.rpartition(".")[2]
        if (table := _table(stored, key)) and table[name] == old:
            table[name] = new


def _pop_all(tree: dict[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if table := _table(tree, key):
            yield key, table.pop(key.rpartition(".")[2])


def _table(tree: Any, key: str) -> dict[str, Any] | None:
    """Return the table that holds a dotted key; None: the key isn't set."""
    *place, name = key.split(".")
    for part in place:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) and name in tree else None
