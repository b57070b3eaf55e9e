"""The shared store on two nodes: reads across them, and the loss of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infra.storage.shared_memory import remove_dead_folders
from infra.stores.files import FsspecColumnStore
from infra.stores.shared.client import SharedColumnStore
from infra.stores.shared.flight import FlightClient
from infra.stores.shared.index import find_shared_store, start_shared_store
from infra.stores.shared.node_files import Limits
from infra.stores.tiered import TieredColumnStore
from rl_core.columns.codec import value_dtypes
from rl_core.columns.jagged import jagged, row_lengths
from rl_core.columns.prompts import rows_of_prompts, share_prompts
from rl_core.views import new_batch, select
from schemas.batch import BatchHandle, ChunkRef
from schemas.errors import ChunkNotFoundError
from tests.contracts.backends import CAPACITY, COLUMNS, NEVER_SECONDS, key, rollout_columns
from tests.support.progress import wait_until

pytestmark = pytest.mark.slow

RUN = "nodes"
LENGTHS = [5, 0, 100_000, 7, 200_000, 3]


class Elsewhere:
    """A client on the other node."""

    def put(self, lengths: list[int], shard: int = 0) -> ChunkRef:
        store = find_shared_store(RUN)
        return store.put(key(store, 1, shard), rollout_columns(lengths, shard))

    def put_rows(self, rows: pa.RecordBatch) -> ChunkRef:
        store = find_shared_store(RUN)
        return store.put(key(store, 1, 0), rows)

    def read(self, batch: BatchHandle) -> list[dict[str, Any]]:
        return find_shared_store(RUN).read(batch, COLUMNS).to_pylist()

    def folder(self) -> str:
        return find_shared_store(RUN)._member.folder


def add_node(cluster: Cluster) -> Any:
    added = cluster.add_node(num_cpus=1, object_store_memory=2**27)
    cluster.wait_for_nodes()
    return added


def client_on(node: Any) -> Any:
    """Start an actor on a node."""
    pinned = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(Elsewhere).options(num_cpus=0, scheduling_strategy=pinned).remote()


@pytest.fixture(scope="module")
def node(ray_cluster: Cluster) -> Iterator[Any]:
    """A second node."""
    added = add_node(ray_cluster)
    yield added
    ray_cluster.remove_node(added)


@pytest.fixture
def elsewhere(node: Any) -> Any:
    """An actor on the second node."""
    return client_on(node)


@pytest.fixture
def store(ray_cluster: Cluster, tmp_path: Path) -> Iterator[SharedColumnStore]:
    made = start_shared_store(RUN, Limits(CAPACITY, NEVER_SECONDS, str(tmp_path)))
    made.open(1)
    yield made
    made.close()


def batch_of(*refs: ChunkRef) -> BatchHandle:
    columns = pa.Table.from_batches([rollout_columns(LENGTHS, shard) for shard in range(len(refs))])
    lengths = row_lengths(columns.column("response_ids").combine_chunks())
    return new_batch(RUN, 1, 0, list(refs), value_dtypes(rollout_columns(LENGTHS)), [1] * len(lengths), lengths)


def server_process(store: SharedColumnStore, folder: str) -> psutil.Process:
    """Return the process that holds the lock of a column server's folder."""
    lock = Path(folder) / "lock"
    owners = [process for process in psutil.process_iter() if _holds(process, lock)]
    (owner,) = owners
    return owner


def _holds(process: psutil.Process, path: Path) -> bool:
    try:
        return str(path) in {file.path for file in process.open_files()}
    except psutil.Error:
        return False


def spy_on_responses(monkeypatch: pytest.MonkeyPatch) -> list[pa.RecordBatch]:
    """Return a list to which whatever this process receives of columns is added."""
    received, get = [], FlightClient.get

    def spy(client: FlightClient, ticket: dict[str, object]) -> pa.RecordBatch:
        received.append(get(client, ticket))
        return received[-1]

    monkeypatch.setattr(FlightClient, "get", spy)
    return received


def test_rows_are_read_across_nodes(store: SharedColumnStore, elsewhere: Any) -> None:
    here = store.put(key(store, 1, 0), rollout_columns(LENGTHS, 0))
    there = ray.get(elsewhere.put.remote(LENGTHS, 1))
    batch = batch_of(here, there)
    expected = [row for shard in range(2) for row in rollout_columns(LENGTHS, shard).to_pylist()]
    assert store.read(batch, COLUMNS).to_pylist() == expected
    assert ray.get(elsewhere.read.remote(batch)) == expected
    some = select(batch, [11, 7, 6, 0, 9])
    assert store.read(some, COLUMNS).to_pylist() == [expected[row] for row in (11, 7, 6, 0, 9)]


def test_a_node_whose_column_server_does_not_start_keeps_no_other_from_joining(
    store: SharedColumnStore, ray_cluster: Cluster, elsewhere: Any
) -> None:
    stuck, index = add_node(ray_cluster), ray.get_actor(f"sluice/{RUN}/store", namespace="sluice")
    raylet = psutil.Process(stuck.all_processes["raylet"][0].process.pid)
    raylet.suspend()
    try:
        joining = [index.join.remote(stuck.node_id) for _ in range(8)]  # one for each of its ranks
        assert Path(ray.get(elsewhere.folder.remote())) != Path(store._member.folder)
        assert ray.wait(joining, timeout=0) == ([], joining)
    finally:
        raylet.resume()
    assert len({member.folder for member in ray.get(joining)}) == 1
    ray_cluster.remove_node(stuck)


@pytest.mark.extended
def test_only_the_rows_and_columns_asked_for_are_moved(
    store: SharedColumnStore, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ray.get(elsewhere.put.remote(LENGTHS, 0))
    assert there.num_bytes > 1_500_000
    received = spy_on_responses(monkeypatch)
    rows = store.read(select(batch_of(there), [0, 3]), ["response_ids", "reward"])
    assert rows.num_rows == 2
    (sent,) = received
    assert (sent.num_rows, sent.schema.names) == (2, ["response_ids", "reward"])
    assert sent.get_total_buffer_size() < 1_000


@pytest.mark.extended
def test_a_prompt_is_moved_once_for_its_samples(
    store: SharedColumnStore, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [[10_000] * 8, [1] * 8]
    rows = pa.record_batch(
        {
            "prompt_ids": jagged([np.full(10_000, row // 4, np.uint16) for row in range(8)]),
            "response_ids": jagged([np.array([row], np.uint16) for row in range(8)]),
        }
    )
    shared = share_prompts(rows)
    there = ray.get(elsewhere.put_rows.remote(shared))
    batch = new_batch(RUN, 1, 0, [there], value_dtypes(rows), *lengths, rows_of_prompts(shared["prompt_ids"]))
    received = spy_on_responses(monkeypatch)
    assert store.read(select(batch, [7, 5, 6]), rows.schema.names).equals(rows.take(pa.array([7, 5, 6])))
    prompts, responses = received
    assert (prompts.schema.names, prompts["prompt_ids"].to_pylist()) == (["prompt_ids"], [[1] * 10_000])
    assert (responses.schema.names, responses["response_ids"].to_pylist()) == (["response_ids"], [[5], [6], [7]])


@pytest.mark.extended
def test_cleared_chunks_leave_the_other_nodes_memory(store: SharedColumnStore, elsewhere: Any) -> None:
    ray.get(elsewhere.put.remote(LENGTHS))
    folder = Path(ray.get(elsewhere.folder.remote()))
    assert folder != Path(store._member.folder)
    assert len(list(folder.glob("*.arrow"))) == 1
    store.clear(1)
    assert not list(folder.glob("*.arrow"))


def test_a_killed_column_server_loses_its_chunks_and_is_started_again(store: SharedColumnStore, elsewhere: Any) -> None:
    here = store.put(key(store, 1, 0), rollout_columns(LENGTHS, 0))
    there = ray.get(elsewhere.put.remote(LENGTHS, 1))
    server_process(store, ray.get(elsewhere.folder.remote())).kill()
    with pytest.raises(ChunkNotFoundError, match="nodes/1/rollout/1/0 is lost with its node's column server"):
        store.read(batch_of(here, there), COLUMNS)
    assert store.usage().num_chunks == 1
    assert store.read(batch_of(here), COLUMNS).equals(rollout_columns(LENGTHS, 0))
    again = ray.get(elsewhere.put.remote(LENGTHS, 1))  # the stage is run again
    assert store.read(batch_of(here, again), COLUMNS).num_rows == 2 * len(LENGTHS)


@pytest.mark.extended
def test_a_put_finds_its_column_server_gone_and_gets_another(store: SharedColumnStore, elsewhere: Any) -> None:
    folder = Path(ray.get(elsewhere.folder.remote()))
    killed = server_process(store, str(folder))
    killed.kill()
    wait_until(lambda: not killed.is_running())
    remove_dead_folders(folder.parent)  # as the next run on that node does
    assert not folder.exists()
    there = ray.get(elsewhere.put.remote(LENGTHS, 0))
    assert store.read(batch_of(there), COLUMNS).equals(rollout_columns(LENGTHS, 0))


def test_a_dead_node_loses_only_what_is_not_durable(
    store: SharedColumnStore, ray_cluster: Cluster, tmp_path: Path
) -> None:
    node = add_node(ray_cluster)
    elsewhere = client_on(node)
    durable = FsspecColumnStore(RUN, str(tmp_path / "columns"))
    durable.incarnation = store.incarnation
    tiered = TieredColumnStore(store, durable)
    tiered.open(1)
    there = ray.get(elsewhere.put.remote(LENGTHS, 0))
    durable.put(key(store, 1, 0), rollout_columns(LENGTHS, 0))  # as the writer's own tier does
    lost = ray.get(elsewhere.put.remote(LENGTHS, 1))
    ray_cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: node.node_id not in {each["NodeID"] for each in ray.nodes() if each["Alive"]})
    assert tiered.read(batch_of(there), COLUMNS).equals(rollout_columns(LENGTHS, 0))
    with pytest.raises(ChunkNotFoundError):
        tiered.read(batch_of(there, lost), COLUMNS)
    assert store.usage().num_chunks == 0
