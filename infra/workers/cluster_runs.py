"""The runs that have processes in the Ray cluster, whoever started them: listed, and ended."""

from contextlib import suppress

import ray

from infra.ray.actors import NAMESPACE, find_actor, find_actors, kill_actors
from infra.storage.identity import run_id_of
from infra.stores.shared.index import find_shared_store, index_name
from infra.workers.placement import release
from schemas.errors import RunError, StoreError, WorkerLostError
from schemas.placement import ActorInfo, ClusterRun

_ANSWER_SECONDS = 10.0  # for all processes together; those that are starting, or hang, don't answer
_DRIVERLESS_SECONDS = 30.0  # without a ping; a driver pings every ten seconds


def cluster_runs() -> list[ClusterRun]:
    """Return the runs of this cluster, the oldest first."""
    actors = find_actors(name for names in _actor_names().values() for name in names)
    refs = {name: actor.describe.remote() for name, actor in actors.items()}
    answered, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_ANSWER_SECONDS) if refs else ([], [])
    infos = {name: _answer(ref) for name, ref in refs.items() if ref in answered}
    runs = [
        _summarize(identity, len(names), [info for name in names if (info := infos.get(name)) is not None])
        for identity, names in _actor_names().items()
    ]
    return sorted(runs, key=lambda run: -(run.age_seconds or 0))


def end_run(run: str) -> int:
    """Kill what a run has in this cluster: workers, store, reserved GPUs; return the number of processes.

    Args:
        run: Its identity; or its id, if no other run of that id is in the cluster.

    Raises:
        RunError: Several runs have that id.
    """
    names = _actor_names()
    found = [identity for identity in names if run in (identity, run_id_of(identity))]
    if len(found) > 1 and run not in found:
        raise RunError(
            f"{len(found)} runs of the cluster have the id {run}: {', '.join(found)}; name one of these, or give the "
            "run's directory"
        )
    identity = run if run in found or not found else found[0]
    with suppress(WorkerLostError, StoreError):  # it has none, or its node is gone
        find_shared_store(run_id_of(identity), identity).close()
    kill_actors(names.get(identity, []))
    release(identity)
    return len(names.get(identity, []))


def _actor_names() -> dict[str, list[str]]:
    """Return the names of the runs' actors, by the runs' identities."""
    found: dict[str, list[str]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and "/" in actor["name"]:
            identity = actor["name"].removeprefix("sluice/").split("/")[0]
            found.setdefault(identity, []).append(actor["name"])
    return found


def _answer(ref: "ray.ObjectRef[ActorInfo]") -> ActorInfo | None:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:  # it died just now
        return None


def _summarize(identity: str, num_processes: int, infos: list[ActorInfo]) -> ClusterRun:
    if not infos:
        return ClusterRun(run_id=run_id_of(identity), identity=identity, state="no answer", num_processes=num_processes)
    driverless = min(info.driverless_seconds for info in infos)
    return ClusterRun(
        run_id=run_id_of(identity),
        identity=identity,
        state="driven" if driverless < _DRIVERLESS_SECONDS else "no driver",
        num_processes=num_processes,
        nodes=tuple(sorted({info.address for info in infos})),
        num_gpus=len({(info.address, gpu) for info in infos for gpu in info.gpus}),
        memory_bytes=sum(info.memory_bytes for info in infos) + _store_bytes(identity),
        age_seconds=max(info.age_seconds for info in infos),
        driverless_seconds=driverless,
        owner=next((info.owner for info in infos if info.owner), ""),
    )


def _store_bytes(identity: str) -> int:
    if find_actor(index_name(identity)) is None:
        return 0
    try:
        return find_shared_store(run_id_of(identity), identity).usage().num_bytes
    except (WorkerLostError, StoreError):
        return 0
