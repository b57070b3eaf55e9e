"""Publishing weights: safetensors bytes returned by Ray, and buckets through shared memory and by gloo.

    python -m benchmarks.weights [--json] [--megabytes 100 500] [--receivers 1 2] [--bucket-mib 64] [--repeats N]

All actors are on one machine: a policy that holds float32 tensors of 4 MiB, and receivers that copy what they receive
into their own tensors. A publish is timed from the call to the last receiver's response; the transports take turns, and
medians are printed. Each actor's torch has 1 thread. Times are wall-clock; on a machine with other work, compare the
ratios.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from safetensors.torch import load, save

from benchmarks.command import print_table
from infra.engines.base import WeightsBucket
from infra.models.flat_tensors import tensor_specs
from infra.ray.rendezvous import Rendezvous
from infra.weights.carriers import (
    BroadcastReceiver,
    BroadcastSender,
    SharedMemoryReceiver,
    SharedMemorySender,
    open_folder,
)
from infra.weights.group import WeightGroup
from infra.weights.stream import load_weights, send_weights
from schemas.step import ProcessGroupHandle
from schemas.weights import LoadedWeights, SentWeights, TensorSpec, WeightsHandle, WeightsTransfer

HOST, RUN, TIMEOUT = "127.0.0.1", "bench", 120.0
TENSOR_BYTES = 4 * 2**20


class Engine:
    """An engine that copies weights into its own tensors, in place."""

    dtype = "float32"

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._own, self.version = state, 0

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        for bucket in buckets:
            for name in bucket.tensors:
                self._own[name].copy_(bucket.tensors[name])
        self.version = version


class Member:
    """The actor of the policy (rank 0) or of a receiver."""

    def __init__(self, megabytes: int, rank: int, bucket_bytes: int) -> None:
        self._state = {f"layer.{n}": torch.full((2**20,), float(n)) for n in range(megabytes * 10**6 // TENSOR_BYTES)}
        self._engine, self._rank, self._bucket_bytes = Engine(self._state), rank, bucket_bytes
        self._folder = open_folder(RUN, None, 2 * bucket_bytes)

    def open_rendezvous(self, num_receivers: int) -> ProcessGroupHandle:
        self._rendezvous = Rendezvous(HOST, 1 + num_receivers)
        return self._rendezvous.group

    def join(self, group: ProcessGroupHandle) -> None:
        self._group = WeightGroup(group, self._rank, HOST, torch.device("cpu"), TIMEOUT)

    def safetensors(self) -> bytes:
        return save(self._state)

    def load_safetensors(self, data: bytes, version: int) -> None:
        state = load(data)
        self._engine.load_weights(tensor_specs(state), [WeightsBucket(state)], version)

    def send(self, version: int, by_broadcast: bool) -> SentWeights:
        group, folder = self._group, self._folder.path
        sender: Any = BroadcastSender(group) if by_broadcast else SharedMemorySender(group, folder)
        handle = WeightsHandle(
            run_id=RUN, version=version, tensors=tensor_specs(self._state), bucket_bytes=self._bucket_bytes
        )
        return send_weights(group, sender, handle, self._state.items())

    def load(self, version: int, by_broadcast: bool) -> LoadedWeights:
        receiver: Any = BroadcastReceiver(self._group) if by_broadcast else SharedMemoryReceiver(self._group)
        _, loaded = load_weights(self._group, receiver, self._engine, RUN, version)
        return loaded


def main() -> None:
    """Print the table, and with `--json` one last line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also print one last line of JSON")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=max(256, 4 * max(arguments.megabytes)) * 10**6,
        log_to_driver=False,
        _node_ip_address=HOST,
    )
    results = {}
    for megabytes in arguments.megabytes:
        member, sizes = ray.remote(num_cpus=0)(Member), (megabytes, arguments.bucket_mib * 2**20)
        members = [member.remote(sizes[0], rank, sizes[1]) for rank in range(1 + max(arguments.receivers))]
        for count in arguments.receivers:
            results[f"{megabytes} MB / {count}"] = measure(members[0], members[1 : 1 + count], arguments.repeats)
        for member in members:
            ray.kill(member)
    print_table("size / receivers", results, 18, 13)
    if arguments.json:
        print(json.dumps({"repeats": arguments.repeats, "bucket_mib": arguments.bucket_mib, "results": results}))
    ray.shutdown()


def measure(policy: Any, receivers: list[Any], repeats: int) -> dict[str, float]:
    """Return the median seconds of each transport, and of shared memory's parts, after one warm-up of each."""
    group = ray.get(policy.open_rendezvous.remote(len(receivers)))
    ray.get([member.join.remote(group) for member in (policy, *receivers)])
    seconds: dict[str, list[float]] = {"safetensors": [], "shared_memory": [], "broadcast": []}
    transfers: list[WeightsTransfer] = []
    for version in range(1 + repeats):
        for transport, samples in seconds.items():
            started = time.perf_counter()
            transfer = publish(policy, receivers, version, transport)
            samples.append(time.perf_counter() - started)
            transfers += [transfer] if transfer is not None and transport == "shared_memory" and version else []
    medians = {transport: statistics.median(samples[1:]) for transport, samples in seconds.items()}
    parts = {
        f"store_{part}": statistics.median(getattr(transfer, f"{part}_seconds") for transfer in transfers)
        for part in ("write", "read", "load")
    }
    return {name: round(value, 3) for name, value in {**medians, **parts}.items()}


def publish(policy: Any, receivers: list[Any], version: int, transport: str) -> WeightsTransfer | None:
    """Publish once; return the transfer's own figures, None for safetensors, which has none."""
    if transport == "safetensors":
        refs = [policy.safetensors.remote() for _ in receivers]  # each receiver requests its own
        calls = zip(receivers, refs, strict=True)
        ray.get([receiver.load_safetensors.remote(data, version) for receiver, data in calls])
        return None
    by_broadcast = transport == "broadcast"
    sent = policy.send.remote(version, by_broadcast)
    loaded = ray.get([receiver.load.remote(version, by_broadcast) for receiver in receivers])
    return WeightsTransfer.of(transport, ray.get(sent), loaded)


if __name__ == "__main__":
    main()
