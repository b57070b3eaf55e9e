"""The store's metrics, as Prometheus scrapes them from each node's Ray agent."""

import urllib.request

import pytest
import ray

from infra.stores.shared.index import start_shared_store
from infra.stores.shared.node_files import Limits
from tests.contracts.backends import CAPACITY, key, put_batch, rollout_columns
from tests.support.progress import wait_until

RUN = "watched"


@pytest.mark.extended
def test_ray_exports_the_stores_metrics(ray_cluster: None) -> None:
    store = start_shared_store(RUN, Limits(CAPACITY, 60, None))
    try:
        store.open(1)
        batch = put_batch(store, 1, [rollout_columns([2, 3])])
        store.read(batch, ["reward"])
        traffic = store.take_traffic("put")
        held = store.usage().num_bytes
        wanted = {
            f'ray_sluice_store_put_bytes_total{{stage="put"}} {float(traffic.put_bytes)}',
            'ray_sluice_store_num_reads_total{stage="put"} 1.0',
            f"ray_sluice_store_num_bytes {float(held)}",
            "ray_sluice_store_open_steps 1.0",
        }
        wait_until(lambda: wanted <= exported_metrics())
        assert store.put(key(store, 1, 5), rollout_columns([1])).num_rows == 1
    finally:
        store.close()


def exported_metrics() -> set[str]:
    """Return this run's metrics, without the labels that Ray adds; none before Ray's agent is up."""
    port = ray.nodes()[0]["MetricsExportPort"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
            lines = response.read().decode().splitlines()
    except OSError:
        return set()
    own = [line for line in lines if f'run_id="{RUN}"' in line]
    found = set()
    for line in own:
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        stage = [label for label in labels.split(",") if label.startswith("stage=")]
        found.add(f"{name}{{{stage[0]}}} {float(value)}" if stage else f"{name} {float(value)}")
    return found
