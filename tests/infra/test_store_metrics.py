"""The store's figures, where Prometheus finds them: on the port of each node's Ray agent."""

import time
import urllib.request

import pytest
import ray

from infra.stores.ray import RayColumnStore
from tests.contracts.backends import CAPACITY, key, put_batch, rollout_columns

pytestmark = pytest.mark.slow

RUN = "watched"


def test_ray_serves_the_stores_figures(ray_cluster: None) -> None:
    store = RayColumnStore(RUN, CAPACITY)
    try:
        store.open_lease(1)
        batch = put_batch(store, 1, [rollout_columns([2, 3])])
        store.read(batch, ["reward"])
        traffic = store.take_traffic("put")
        held = store.usage().num_bytes
        wanted = {
            f'ray_sluice_store_put_bytes_total{{stage="put"}} {float(traffic.put_bytes)}',
            'ray_sluice_store_num_reads_total{stage="put"} 1.0',
            f"ray_sluice_store_num_bytes {float(held)}",
            "ray_sluice_store_leaked_bytes 0.0",
            "ray_sluice_store_open_leases 1.0",
        }
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not wanted <= figures():
            time.sleep(1)
        assert wanted <= figures(), figures()
        assert store.put(key(store, 1, 5), rollout_columns([1])).num_rows == 1
    finally:
        store.close()


def figures() -> set[str]:
    """This run's lines, without the labels that Ray adds."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    mine = [line for line in lines if f'run_id="{RUN}"' in line]
    found = set()
    for line in mine:
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        stage = [label for label in labels.split(",") if label.startswith("stage=")]
        found.add(f"{name}{{{stage[0]}}} {float(value)}" if stage else f"{name} {float(value)}")
    return found
