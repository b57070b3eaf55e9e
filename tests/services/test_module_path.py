"""Files next to the config that are named like Sluice's packages, and workers on a Ray."""

from pathlib import Path

import pytest
import ray

from tests.support.shadowing_folder import check, folder, run_driver

__all__ = ["folder"]  # a fixture


@pytest.mark.extended
def test_files_next_to_the_config_shadow_no_module_of_a_worker(ray_cluster: None, folder: Path) -> None:
    found = run_driver(folder, ray.get_runtime_context().gcs_address)
    assert set(found) == {"driver", "task", "actor", "detached actor"}
    for process in found.values():
        check(process, folder)
