"""Drivers as Ray jobs: that of the Kubernetes manifests, and the command of docs/cluster.md, on a Ray on loopback."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.configs import config_toml
from tests.support.deploy_files import ROOT, manifests
from tests.support.progress import wait_until
from tests.support.site_on_loopback import Site
from tests.support.tiny import make_tiny_data, make_tiny_model

pytestmark = pytest.mark.extended

SUBMITTED = shlex.split(re.findall(r"ray job submit .* -- \\\n(.*)", (ROOT / "docs/cluster.md").read_text())[0])
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
        submit = ["ray", "job", "submit", "--address=http://head:8265", "--"]
        assert "step   1/1" in site.run([*submit, *job], environment, "first.log")
        assert "run train-1 is complete: 1 of 1 steps" in site.run([*submit, *job], environment, "second.log")
        by_hand = [part.replace("/mnt/train", str(site.folder)) for part in SUBMITTED]
        assert "step   1/1" in site.run([*submit, *by_hand], environment, "third.log")
    finally:
        site.close()
