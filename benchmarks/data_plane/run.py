"""The measurement: all paths in turn, between one producer and one consumer process on one local Ray."""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from benchmarks.data_plane.actors import PATHS, Consumer, Producer
from benchmarks.data_plane.baselines import (
    RayPaddedDict,
    RayPaddedLean,
    RayPaddedNumpy,
    TransferQueueJagged,
    TransferQueuePadded,
)
from benchmarks.data_plane.batch import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, Ints
from benchmarks.data_plane.paths import ArrowIpcPlasma, Memcpy, Sluice
from schemas.errors import RunError

PADDED = (TransferQueuePadded.name, RayPaddedDict.name, RayPaddedNumpy.name)
OBJECT_STORE_BYTES = 4 * 2**30
LOGICAL_CPUS = 8  # TransferQueue's actors request one each; not a number of threads
NEEDED = {"transfer_queue": "TransferQueue", "matplotlib": "matplotlib"}
VERSIONS = ("ray", "torch", "pyarrow", "numpy", "tensordict", "TransferQueue")

logger = logging.getLogger(__name__)

Sample = dict[str, float]  # milliseconds by operation


@dataclass(frozen=True)
class Plan:
    """The batch sizes and repetitions to measure."""

    num_rows: int = 512
    repetitions: int = 25
    warm_ups: int = 5
    large_bytes: int = 400_000_000
    large_repetitions: int = 7
    large_warm_ups: int = 6


QUICK = Plan(repetitions=2, warm_ups=1, large_bytes=40_000_000, large_repetitions=2, large_warm_ups=1)


@dataclass(frozen=True)
class Processes:
    """The two actors of a measurement, and their paths."""

    producer: Any
    consumer: Any
    names: tuple[str, ...]


def measure(plan: Plan) -> dict[str, Any]:
    """Measure everything; see `_report` for the figures.

    Raises:
        RunError: A package of the extra `bench` is missing.
        AssertionError: A consumer read something else than the producer put.
    """
    require_extra()
    with local_ray():
        with processes(tuple(PATHS), plan.num_rows) as reference:
            batch = ray.get(reference.producer.describe.remote())
            logger.info("verifying every path")
            for name in reference.names:
                verify(reference, name)
            samples = run_rounds(reference, plan.warm_ups, plan.repetitions)
            stored = {name: ray.get(reference.producer.num_bytes.remote(name)) for name in reference.names}
            breakdown = measure_breakdown(reference, plan.repetitions)
        repeats = -(-plan.large_bytes // batch["valid_bytes"])
        with processes((Sluice.name, Memcpy.name), plan.num_rows, repeats) as large:
            large_bytes = ray.get(large.producer.describe.remote())["valid_bytes"]
            large_samples = run_rounds(large, plan.large_warm_ups, plan.large_repetitions, only_read=True)
    return _report(plan, batch, samples, stored, breakdown, large_bytes, large_samples)


def require_extra() -> None:
    """Check that the packages of the extra `bench` are installed.

    Raises:
        RunError: One is missing; the message names the extra.
    """
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RunError(
            f"benchmarks need a checkout and the extra `bench`; missing: {', '.join(missing)}; "
            "install with: pip install -e '.[bench]'"
        )


@contextmanager
def local_ray() -> Iterator[None]:
    """Run a private Ray instance on loopback for the duration."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace="sluice",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
        logging_level=logging.WARNING,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def processes(names: tuple[str, ...], num_rows: int, repeats: int = 1) -> Iterator[Processes]:
    """Hold a producer and a consumer that are ready; close and kill them afterwards."""
    producer: Any = ray.remote(Producer).options(num_cpus=0).remote(names, num_rows, repeats)
    ray.get(producer.describe.remote())  # the consumer connects to what this has prepared
    readable = tuple(name for name in names if PATHS[name].reads)
    consumer: Any = ray.remote(Consumer).options(num_cpus=0).remote(readable)
    try:
        yield Processes(producer, consumer, names)
        ray.get(producer.close.remote())
    finally:
        for actor in (consumer, producer):
            ray.kill(actor)


def verify(pair: Processes, name: str) -> None:
    """Check that the consumer's tensors equal the source: as read, permuted, and appended.

    Raises:
        AssertionError: They differ; the message names the path and the columns.
    """
    _, handle = ray.get(pair.producer.put.remote(name, 0))
    if not PATHS[name].reads:
        assert ray.get(pair.producer.is_copied.remote(name)), f"{name} did not copy the batch"
        return
    for order in (None, _permutation(0, _num_rows(pair))):
        expected = ray.get(pair.producer.expected.remote(order))
        _require_equal(name, expected, ray.get(pair.consumer.digests.remote(name, handle, order)))
    _, handle = ray.get(pair.producer.append.remote(name, 0, handle))
    expected = ray.get(pair.producer.expected_appended.remote())
    _require_equal(name, expected, ray.get(pair.consumer.digests_appended.remote(name, handle)))
    ray.get(pair.producer.clear.remote(name, 0, handle))


def run_rounds(pair: Processes, warm_ups: int, repetitions: int, *, only_read: bool = False) -> dict[str, list[Sample]]:
    """Measure all paths once per round, in a different order each round; return the samples by path.

    This way, noise on the machine and the state that a path leaves in caches and queues affect all paths equally.
    """
    samples: dict[str, list[Sample]] = defaultdict(list)
    num_rows = _num_rows(pair)
    for step in range(1, warm_ups + repetitions + 1):
        logger.info("round %d of %d%s", step, warm_ups + repetitions, "" if step > warm_ups else " (warm-up)")
        order = _permutation(step, num_rows)
        for name in (pair.names[at] for at in _permutation(step, len(pair.names))):
            sample = _sample(pair, name, step, None if only_read else order)
            if step > warm_ups:
                samples[name].append(sample)
    return samples


def measure_breakdown(pair: Processes, repetitions: int) -> dict[str, dict[str, float]]:
    """Return the breakdown of each of Sluice's operations: medians in milliseconds."""
    producer, consumer, name = pair.producer, pair.consumer, Sluice.name
    samples: dict[str, list[Sample]] = defaultdict(list)
    num_rows = _num_rows(pair)
    for step in range(10_000, 10_000 + repetitions):
        parts, handle = ray.get(producer.put_by_parts.remote(name, step))
        samples["put"].append(parts)
        samples["read"].append(ray.get(consumer.read_by_parts.remote(name, handle)))
        order = _permutation(step, num_rows)
        samples["permuted_read"].append(ray.get(consumer.read_by_parts.remote(name, handle, order)))
        samples["request"].append({"empty_call": ray.get(consumer.empty_call.remote())})
        ray.get(producer.clear.remote(name, step, handle))
    return {operation: _medians(parts) for operation, parts in samples.items()}


def _sample(pair: Processes, name: str, step: int, order: Ints | None) -> Sample:
    """Measure one put and one read; if `order` is given, also a read in that order and an append."""
    producer, consumer = pair.producer, pair.consumer
    sample: Sample = {}
    sample["put_ms"], handle = ray.get(producer.put.remote(name, step))
    if PATHS[name].reads:
        sample["fetch_ms"], pack_ms = ray.get(consumer.read.remote(name, handle))
        sample["read_ms"] = sample["fetch_ms"] + pack_ms
        sample["round_trip_ms"] = sample["put_ms"] + sample["read_ms"]
        if order is not None:
            sample["permuted_read_ms"] = sum(ray.get(consumer.read.remote(name, handle, order)))
    if order is not None:
        sample["append_ms"], handle = ray.get(producer.append.remote(name, step, handle))
    ray.get(producer.clear.remote(name, step, handle))
    return sample


def _report(
    plan: Plan,
    batch: dict[str, int],
    samples: dict[str, list[Sample]],
    stored: dict[str, int],
    breakdown: dict[str, dict[str, float]],
    large_bytes: int,
    large_samples: dict[str, list[Sample]],
) -> dict[str, Any]:
    operations = ("put_ms", "read_ms", "permuted_read_ms", "append_ms", "round_trip_ms")
    medians = {name: _medians(samples[name]) for name in samples}
    paths = {
        name: {**{operation: medians[name].get(operation) for operation in operations}, "bytes": stored[name]}
        for name in stored
    }
    large = {name: _medians(large_samples[name]) for name in large_samples}
    sluice, bare_arrow = medians[Sluice.name], medians[ArrowIpcPlasma.name]
    round_trips = {name: medians[name].get("round_trip_ms", 0.0) for name in medians}
    best_padded = min(PADDED, key=lambda name: round_trips[name])
    width = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    return {
        "batch": {
            **batch,
            "fill": round(batch["tokens"] / (batch["rows"] * width), 4),
            "padded_bytes": stored[RayPaddedDict.name],
            "repetitions": plan.repetitions,
            "warm_ups": plan.warm_ups,
        },
        "paths": {name: {**_rounded(path), "verified": True} for name, path in paths.items()},
        "ratio_vs_transfer_queue": _ratio(round_trips[TransferQueueJagged.name], round_trips[Sluice.name]),
        "ratio_vs_best_padded": _ratio(round_trips[best_padded], round_trips[Sluice.name]),
        "best_padded": best_padded,
        "ratio_vs_lean_padded": _ratio(round_trips[RayPaddedLean.name], round_trips[Sluice.name]),
        "memcpy_fraction_400mb": _ratio(large[Memcpy.name]["put_ms"], large[Sluice.name]["put_ms"]),
        "read_400mb_ms": round(large[Sluice.name]["fetch_ms"], 3),
        "large": {
            "valid_bytes": large_bytes,
            "repetitions": plan.large_repetitions,
            "warm_ups": plan.large_warm_ups,  # the first puts fault in cold pages
            "put_ms": round(large[Sluice.name]["put_ms"], 3),
            "memcpy_ms": round(large[Memcpy.name]["put_ms"], 3),
            "read_to_tensors_ms": round(large[Sluice.name]["read_ms"], 3),
        },
        "stored_ratio": round(stored[Sluice.name] / batch["valid_bytes"], 4),
        "breakdown": {
            **{operation: _rounded(parts) for operation, parts in breakdown.items()},
            # The put minus Arrow's copy of the bytes; the read minus the same read of bare Arrow bytes.
            "orchestration_put_ms": round(breakdown["put"]["total"] - breakdown["put"]["write"], 3),
            "orchestration_read_ms": round(sluice["read_ms"] - bare_arrow["read_ms"], 3),
        },
        "machine": describe_machine(),
    }


def describe_machine() -> dict[str, Any]:
    """Return the cores and package versions that the figures were measured with."""
    versions = {name.lower(): importlib.metadata.version(name) for name in VERSIONS}
    return {"cores": os.cpu_count(), "python": platform.python_version(), **versions}


def _permutation(seed: int, size: int) -> Ints:
    return np.random.default_rng(seed).permutation(size)


def _num_rows(pair: Processes) -> int:
    return int(ray.get(pair.producer.describe.remote())["rows"])


def _require_equal(name: str, expected: dict[str, str], actual: dict[str, str]) -> None:
    wrong = sorted(column for column in expected.keys() | actual.keys() if expected.get(column) != actual.get(column))
    if wrong:
        raise AssertionError(f"{name} does not return what was put; columns that differ: {', '.join(wrong)}")


def _medians(samples: Sequence[Sample]) -> Sample:
    """Return the median of each operation, each on its own."""
    return {operation: median(sample[operation] for sample in samples) for operation in samples[0]}


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}


def _ratio(numerator: float, denominator: float) -> float:
    return round(numerator / denominator, 3)
