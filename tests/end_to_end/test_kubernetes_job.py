"""The job of the Kubernetes manifests, submitted to a Ray on loopback."""

import shlex
from pathlib import Path

import pytest

from tests.support.configs import config_toml
from tests.support.deploy_files import manifests
from tests.support.progress import wait_until
from tests.support.site_on_loopback import Site
from tests.support.tiny import make_tiny_data, make_tiny_model

pytestmark = pytest.mark.extended

ENTRYPOINT = shlex.split(manifests()["rayjob.yaml RayJob sluice-train"]["spec"]["entrypoint"])


def test_the_job_trains_and_resumes_as_a_ray_job(tmp_path: Path) -> None:
    site = Site(tmp_path / "data", ["head"])
    try:
        make_tiny_model(site.folder / "model")
        make_tiny_data(site.folder / "train.parquet", 8)
        rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8}
        (site.folder / "train.toml").write_text(config_toml(name="tiny", steps=1, rollout=rollout))
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "PREFECT_HOME": ".prefect"}
        own = [f"--node-ip-address={site.addresses['head']}", "--port=6379", "--num-cpus=1", "--dashboard-host=0.0.0.0"]
        head = site.start(["ray", "start", "--head", "--block", *own], environment, "head.log")
        log = site.folder / "head.log"
        wait_until(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None)
        job = [part.replace("cd /data;", f"cd {site.folder};") for part in ENTRYPOINT]
        submit = ["ray", "job", "submit", "--address=http://head:8265", "--", *job]
        assert "step   1/1" in site.run(submit, environment, "first.log")
        assert "run train-1 is complete: 1 of 1 steps" in site.run(submit, environment, "second.log")
    finally:
        site.close()
