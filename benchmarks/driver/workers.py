"""Fake workers: they answer at once, in this process, with results of the real types and sizes.

A call costs the driver what the serialization of a call of a Ray actor costs it: its arguments are pickled by Ray's own
pickler for each call, except those that are in Ray's object store already, and its result is unpickled. What a worker
itself does (making the result, pickling it, the requests to the store's index that put its chunk) is left out of the
driver's time. So is Ray's own work: to submit a call and to receive its reply.
"""

import pickle
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import ray
from ray import ObjectRef, cloudpickle

from benchmarks.driver.meter import Meter
from infra.stores.shared.flight import FlightClient
from infra.workers.launch import worker_name
from schemas.batch import ChunkKey, ChunkRef
from schemas.metrics import Mean
from schemas.plan import ForwardPlan
from schemas.rollout import PutResult, RolloutShard
from schemas.step import PolicyHandle, RunHandle, ScoreResult, UpdateReport
from schemas.store import StoreTraffic
from schemas.weights import WeightGroupMember

INCARNATION = "fake"  # of the policy's ranks
FAILED_FRACTION = 1e-3  # of the rewards
SHORTEST_PROMPT, LONGEST_PROMPT, SHORTEST_RESPONSE = 32, 256, 16  # tokens
BYTES_PER_ROW = 64  # of a chunk, as the index counts them
ROLLOUT_DTYPES = {"prompt_ids": "uint16", "response_ids": "uint16", "loss_mask": "bool", "reward": "float"}
NUM_UPDATE_METRICS = 20


class Workers:
    """All workers of a run: the policy's ranks and the rollout workers.

    Args:
        run: The run.
        index: A client of the index of the run's store.
        location: The column server that would own the chunks' files.
    """

    def __init__(self, run: RunHandle, index: FlightClient, location: str) -> None:
        self.run, self._index, self._location = run, index, location
        self.version = 0  # of the policy, which all workers hold
        self.meter = Meter()  # of the current step
        self.num_calls, self.argument_bytes = 0, 0
        config = run.config
        self._by_name: dict[str, Worker] = {}
        for rank in range(config.runtime.num_policy_ranks):
            self._by_name[worker_name(run.identity, "policy", rank)] = Worker(self, PolicyRank(self, rank))
        for number in range(config.rollout.num_workers):
            self._by_name[worker_name(run.identity, "rollout", number)] = Worker(self, RolloutWorker(self, number))
        self._counted: tuple[ObjectRef[ForwardPlan] | None, list[int]] = None, []

    def find(self, name: str) -> "Worker | None":
        """Return the worker of that name."""
        return self._by_name.get(name)

    def put(self, stage: str, step: int, shard: int, num_rows: int, dtypes: dict[str, str]) -> PutResult:
        """Have the index add a chunk whose file is not written."""
        key = ChunkKey(run_id=self.run.run_id, step=step, stage=stage, shard=shard)
        file, num_bytes = (self._location, f"{stage}-{step}-{shard}.arrow"), BYTES_PER_ROW * num_rows
        answer = self._index.call("put", str(key), num_rows, num_bytes, file)
        traffic = StoreTraffic(num_puts=1, put_bytes=num_bytes, put_seconds=1e-3)
        return PutResult(chunk=ChunkRef(**answer["ref"]), dtypes=dtypes, traffic=traffic)

    def num_rows(self, plan: "ObjectRef[ForwardPlan]", rank: int) -> int:
        """Return the number of a rank's rows in a plan."""
        if self._counted[0] is not plan:
            fetched = ray.get(plan)
            self._counted = plan, [len(fetched.rank_rows(rank)) for rank in range(len(fetched.rank_costs))]
        return self._counted[1][rank]


class Worker:
    """The handle of a fake worker: any method of it may be called, as those of a Ray actor."""

    def __init__(self, workers: Workers, worker: object) -> None:
        self._workers, self._worker = workers, worker

    def __getattr__(self, method: str) -> "Method":
        return Method(self._workers, getattr(self._worker, method))


class Method:
    """A worker's method, as a Ray actor's handle has it."""

    def __init__(self, workers: Workers, method: Callable[..., object]) -> None:
        self._workers, self._method = workers, method

    def remote(self, *args: Any) -> Coroutine[Any, Any, Any]:
        """Pickle the arguments, do the worker's work, and return what is awaited for the result."""
        workers = self._workers
        workers.num_calls += 1
        pickled = [cloudpickle.dumps(arg) for arg in args if not isinstance(arg, ObjectRef)]
        workers.argument_bytes += sum(map(len, pickled))
        cpu, wall = time.process_time(), time.perf_counter()
        reply = cloudpickle.dumps(self._method(*args))
        workers.meter.exclude(cpu, wall)
        return _unpickle(reply)


async def _unpickle(reply: bytes) -> Any:
    return pickle.loads(reply)  # noqa: S301  it was made in this process


class PolicyRank:
    """One rank of the policy."""

    def __init__(self, workers: Workers, rank: int) -> None:
        self._workers, self._rank = workers, rank

    def incarnation(self) -> str:
        return INCARNATION

    def score(self, batch: object, plan: "ObjectRef[ForwardPlan]", version: int) -> ScoreResult:
        num_rows = self._workers.num_rows(plan, self._rank)
        put = self._workers.put("logprob", version, self._rank, num_rows, {"behavior_logprobs": "float"})
        return ScoreResult(put=put if num_rows else None)

    def update(self, batch: object, plan: object, version: int) -> UpdateReport | None:
        self._workers.version = version + 1
        if self._rank:
            return None
        policy = PolicyHandle(run_id=self._workers.run.run_id, version=version + 1, incarnation=INCARNATION)
        metrics = {f"metric-{number}": Mean(total=number, weight=3) for number in range(NUM_UPDATE_METRICS)}
        return UpdateReport(policy=policy, metrics=metrics, traffic=StoreTraffic(num_reads=1))


class RolloutWorker:
    """One rollout worker, whose samples are random lengths and rewards."""

    def __init__(self, workers: Workers, number: int) -> None:
        self._workers, self._number = workers, number
        self._config = workers.run.config.rollout

    def start(self) -> None: ...

    def weight_group_member(self) -> WeightGroupMember:
        return WeightGroupMember(node="", gpu="", version=self._workers.version)

    def generate(
        self,
        step: int,
        version: int,
        shard: int,
        groups: Sequence[int],
        begun: Sequence[Any],
        schedules: dict[int, Any],
    ) -> RolloutShard:
        random, samples = np.random.default_rng([step, shard]), self._config.samples_per_prompt
        limit, num_rows = self._config.max_response_tokens, len(groups) * samples
        scores, failed = random.integers(0, 2, num_rows), random.random(num_rows) < FAILED_FRACTION
        rewards = np.where(failed, None, scores.astype(np.float64)).tolist()
        prompts = random.integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, len(groups))
        lengths = np.clip(random.lognormal(6, 1, num_rows), SHORTEST_RESPONSE, limit).astype(int).tolist()
        return RolloutShard(
            shard=shard,
            worker=self._number,
            groups=tuple(groups),
            rewards=rewards,
            group_ids=np.repeat(groups, samples).tolist(),
            prompt_lengths=np.repeat(prompts, samples).tolist(),
            response_lengths=lengths,
            loss_tokens=lengths,
            truncated=[length == limit for length in lengths],
            parts={"exact": rewards},
            seconds={"generate": 60.0, "reward": 1.0},
        )

    def put(self, step: int, version: int, shard: int, kept: Sequence[int], reward_parts: Sequence[str]) -> PutResult:
        return self._workers.put("rollout", step, shard, len(kept) * self._config.samples_per_prompt, ROLLOUT_DTYPES)
