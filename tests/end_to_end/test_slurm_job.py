"""The Slurm script, run as Slurm runs it; only `srun` and `scontrol` are stand-ins."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.configs import config_toml
from tests.support.deploy_files import DEPLOY
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.site_on_loopback import Site
from tests.support.tiny import make_tiny_data, make_tiny_model

pytestmark = pytest.mark.extended

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
MACHINES = ("node-1", "node-2")
JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_CPUS_ON_NODE": "1"}
RUN_ID = f"slurm-{JOB['SLURM_JOB_ID']}"

# Starts a Ray node with the chosen machine's address, and with ports that its neighbour here leaves free.
SRUN = """#!/usr/bin/env bash
set -euo pipefail
echo "srun $*" >> .site/srun
chosen=(node-1 node-2)
while [[ $1 == --* ]]; do
    case $1 in
        --nodelist=*) chosen=("${1#*=}") ;;
        --exclude=*) mapfile -t chosen < <(printf '%s\\n' "${chosen[@]}" | grep -vx "${1#*=}") ;;
    esac
    shift
done
[[ ${#chosen[@]} == 1 ]]
address=$(getent hosts "${chosen[0]}" | cut -d ' ' -f 1)
ports="--dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
exec "$@" --node-ip-address="$address" --num-cpus=1 $ports
"""
SCONTROL = """#!/usr/bin/env bash
case "$*" in
    "show hostnames node-[1-2]") printf '%s\\n' node-1 node-2 ;;
    "show job "*) echo "   JobState=RUNNING Reason=None" ;;
    *) echo "scontrol $*" ;;
esac
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two machines with a tiny model, data and a config on their shared mount."""
    made = Site(tmp_path / "shared", MACHINES)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        made.add_command(name, text)
    make_tiny_model(made.folder / "model")
    make_tiny_data(made.folder / "train.parquet", 12)
    rollout = {"num_prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8, "num_workers": 2}
    (made.folder / "tiny.toml").write_text(config_toml(name="tiny", reward={"kind": "exact"}, rollout=rollout))
    yield made
    made.close()
    shutil.rmtree(f"/tmp/ray-{JOB['SLURM_JOB_ID']}", ignore_errors=True)


def job(site: Site) -> dict[str, str]:
    """Return the environment that Slurm gives to the script on the first machine."""
    own = site.folder / "disk"
    own.mkdir(exist_ok=True)
    return JOB | {"HEAD_ADDRESS": site.addresses["node-1"], "TMPDIR": str(own)}


def test_a_job_trains_on_all_machines_and_a_requeued_one_resumes(site: Site) -> None:
    run = Run(site.folder / "runs" / RUN_ID)
    started = site.start(["bash", str(SCRIPT), "tiny.toml", "steps=10000"], job(site), "first.log")
    wait_until(lambda: started.poll() is not None or len(run.metrics.steps()) >= 1)
    printed = (site.folder / "first.log").read_text()
    assert started.poll() is None, printed
    psutil.Process(started.pid).children()[0].terminate()  # of nsenter; as before the time limit: --signal=B:TERM@120
    wait_until(lambda: started.poll() is not None)
    printed = (site.folder / "first.log").read_text()
    assert started.returncode == 143, printed
    assert f"resume with: sluice resume {RUN_ID}" in printed
    assert f"scontrol requeue {JOB['SLURM_JOB_ID']}" in printed
    assert "Traceback" not in printed
    head, others = (site.folder / ".site" / "srun").read_text().splitlines()
    assert "--nodelist=node-1 ray start --block" in head
    assert " --head " in head
    assert "--exclude=node-1 ray start --block" in others
    assert " --address=" in others
    done = len(run.metrics.steps())
    printed = site.run(["bash", str(SCRIPT), "tiny.toml", f"steps={done + 1}"], job(site), "second.log")
    assert f"resuming {RUN_ID}: {done} of {done + 1} steps are done" in printed
    assert len(run.metrics.steps()) == done + 1
    wait_until(lambda: not site.processes())  # nothing is left of Ray and Prefect


def test_a_head_that_does_not_start_ends_the_job(site: Site) -> None:
    site.add_command("srun", "#!/usr/bin/env bash\nexit 3\n")
    printed = site.run(["bash", str(SCRIPT), "tiny.toml"], job(site), "job.log", exit_code=1)
    assert "error: Ray's head did not start on node-1" in printed
