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
    "environment.admission": "environment.resume_rows",
    "environment.admission_steps": "environment.lockstep_steps",
    "data.sources.*.environment.admission": "data.sources.*.environment.resume_rows",
    "data.sources.*.environment.admission_steps": "data.sources.*.environment.lockstep_steps",
}
REMOVED = {  # and why
    "model.lora.dropout": "adapters have none, as a log-prob must be a function of weights and tokens",
    "rollout.speculative": "leave it out",
    "store.lease_seconds": "columns stay until their step is cleared, or without a driver for timeouts.driver_seconds",
    "runtime.gpus_per_worker": 'runtime.placement = "colocated" lets workers share GPUs',
    "runtime.tensorboard": 'monitors = [{ kind = "tensorboard" }] writes them',
}
_RESUME_ROWS = {"steps": "lockstep", "wave": "batch", "arrival": "as_ready"}
VALUES = {  # by key, old values and the ones that replace them
    "store.kind": {"ray": "shared"},
    "weights.transport": {"object_store": "shared_memory"},
    "environment.resume_rows": _RESUME_ROWS,
    "data.sources.*.environment.resume_rows": _RESUME_ROWS,
}


def require_current_keys(given: Any) -> Any:
    """Return what a config is made of, if it has no key of an earlier version.

    Raises:
        ValueError: It has some; the message names them, and what to use instead.
    """
    problems = [f"{old} is now {new}" for old, new in RENAMED.items() if any(_tables(given, old))]
    problems += [f"{old} was removed in 0.3: {reason}" for old, reason in REMOVED.items() if any(_tables(given, old))]
    if problems:
        raise ValueError("; ".join(problems))
    return given


def translate(stored: dict[str, Any]) -> None:
    """Give a run's stored config, of this or an earlier version, the keys and values of this one.

    Args:
        stored: The config as a tree of plain values; it is changed.
    """
    for old in (*RENAMED, *REMOVED):
        section, name = old.rsplit(".", 1)
        for table in list(_tables(stored, old)):
            value = table.pop(name)
            if old in RENAMED:
                new_section, new_name = RENAMED[old].rsplit(".", 1)
                target = table if new_section == section else stored.setdefault(new_section, {})
                target[new_name] = value
            elif old == "runtime.tensorboard" and value:
                stored["monitors"] = [*stored.get("monitors", ()), {"kind": "tensorboard"}]
    for key, values in VALUES.items():
        name = key.rpartition(".")[2]
        for table in _tables(stored, key):
            table[name] = values.get(table[name], table[name])


def _tables(tree: Any, key: str) -> Iterator[dict[str, Any]]:
    """Yield the tables that hold a dotted key, in which `*` stands for each entry of a list."""
    part, _, rest = key.partition(".")
    if part == "*":
        for child in tree if isinstance(tree, list | tuple) else ():
            yield from _tables(child, rest)
    elif isinstance(tree, dict) and part in tree:
        if rest:
            yield from _tables(tree[part], rest)
        else:
            yield tree
