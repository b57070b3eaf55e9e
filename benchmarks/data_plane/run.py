"""The measurement: all paths in turn, between one producer and one consumer process on one local Ray."""

import importlib.metadata
import importlib.util
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from rich.console import Group

from benchmarks.command import Benchmark, Report, option, table
from benchmarks.data_plane.actors import PATHS, Consumer, Producer
from benchmarks.data_plane.batch import Ints
from benchmarks.data_plane.paths import Memcpy, Sluice
from schemas.errors import RunError

OBJECT_STORE_BYTES = 4 * 2**30
LOGICAL_CPUS = 8  # TransferQueue's actors request one each; not a number of threads
VERSIONS = ("ray", "torch", "pyarrow", "numpy", "tensordict", "TransferQueue")

logger = logging.getLogger(__name__)

Sample = dict[str, float]  # milliseconds by operation


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement."""

    rows: int = option(512, "rows of the batch")
    repetitions: int = option(25, "repetitions per path; medians are reported")
    warm_ups: int = option(5, "repetitions before them")
    large_bytes: int = option(400_000_000, "bytes of the large batch, of which only puts and reads are measured")
    large_repetitions: int = option(7, "its repetitions")
    large_warm_ups: int = option(6, "repetitions before them: the first puts fault in cold pages")


QUICK = Plan(repetitions=2, warm_ups=1, large_bytes=40_000_000, large_repetitions=2, large_warm_ups=1)


@dataclass(frozen=True)
class Processes:
    """The two actors of a measurement, and their paths."""

    producer: Any
    consumer: Any
    names: tuple[str, ...]


def measure(plan: Plan) -> Report:
    """Measure everything.

    Returns:
        `paths`: milliseconds of each path's operations, and the bytes that it stores; `ratios`: put and read of each
        path, relative to Sluice's; `large`: the large batch; `batch` and `machine`.

    Raises:
        RunError: TransferQueue, of the extra `bench`, is missing.
        AssertionError: A consumer read something else than the producer put.
    """
    if importlib.util.find_spec("transfer_queue") is None:
        raise RunError("benchmarks need the extra `bench`; TransferQueue is missing: pip install -e '.[bench]'")
    with local_ray():
        with processes(tuple(PATHS), plan.rows) as reference:
            batch = ray.get(reference.producer.describe.remote())
            logger.info("verifying every path")
            for name in reference.names:
                verify(reference, name)
            samples = run_rounds(reference, plan.warm_ups, plan.repetitions)
            stored = {name: ray.get(reference.producer.num_bytes.remote(name)) for name in reference.names}
        repeats = -(-plan.large_bytes // batch["valid_bytes"])
        with processes((Sluice.name, Memcpy.name), plan.rows, repeats) as large:
            large_bytes = ray.get(large.producer.describe.remote())["valid_bytes"]
            large_samples = run_rounds(large, plan.large_warm_ups, plan.large_repetitions, only_read=True)
    times = {name: _medians(each) for name, each in samples.items()}
    large_times = {name: _medians(each) for name, each in large_samples.items()}
    own = times[Sluice.name]["round_trip_ms"]
    return {
        "plan": asdict(plan),
        "batch": batch,
        "paths": {name: {**times[name], "bytes": stored[name]} for name in PATHS},
        "ratios": {name: each["round_trip_ms"] / own for name, each in times.items() if "round_trip_ms" in each},
        "stored_ratio": stored[Sluice.name] / batch["valid_bytes"],
        "large": {
            "valid_bytes": large_bytes,
            "memcpy_ms": large_times[Memcpy.name]["put_ms"],
            **large_times[Sluice.name],
        },
        "machine": {"cores": os.cpu_count(), **{name: importlib.metadata.version(name) for name in VERSIONS}},
    }


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


def render(report: Report) -> Group:
    """Return the report as a table and text."""
    batch, large = report["batch"], report["large"]
    title = f"{batch['rows']} rows, {batch['tokens']:,} tokens, {batch['valid_bytes'] / 1e6:.1f} MB; medians, in ms"
    notes = [
        *(f"put + read: {name} takes {ratio:.1f} times as long" for name, ratio in report["ratios"].items()),
        f"stored bytes over valid bytes: {report['stored_ratio']:.3f}",
        f"{large['valid_bytes'] / 1e6:.0f} MB: put {large['put_ms']:.0f} ms, warm memcpy {large['memcpy_ms']:.0f} ms; "
        f"read {large['fetch_ms']:.1f} ms",
    ]
    return table(title, report["paths"], notes)


BENCHMARK = Benchmark(Plan(), QUICK, measure, render)
