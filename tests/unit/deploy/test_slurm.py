"""The Slurm script: its options, its usage, and how a driver's machine ends; whole jobs: tests/end_to_end."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy_commands import parse, settings_are_accepted
from tests.support.deploy_files import DEPLOY

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_CPUS_ON_NODE": "1"}
BUCKET = "s3://sluice/runs"


def test_the_script_says_what_it_needs() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], env={**os.environ, **JOB}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: sbatch train.sbatch CONFIG [KEY=VALUE...]" in done.stderr


@pytest.mark.parametrize("script", [SCRIPT, DEPLOY / "driver.sh"], ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_a_driver_machine_ends_though_its_prefect_worker_hangs(tmp_path: Path) -> None:
    (tmp_path / "prefect").write_text("#!/usr/bin/env bash\ntrap '' TERM INT\nsleep 1000 & sleep 1000\n")
    (tmp_path / "prefect").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLUICE_STOP_SECONDS": "1"}
    ended = subprocess.run(
        ["bash", str(DEPLOY / "driver.sh"), "true"], env=environment, capture_output=True, check=False
    )
    assert ended.returncode == 1
    assert b"Ray or the Prefect worker has ended" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "settings", "runs_dir"),
    [({}, (), "runs"), ({"RUNS_DIR": BUCKET}, (), BUCKET), ({"RUNS_DIR": BUCKET}, ("runtime.runs_dir=own",), "own")],
)
def test_a_job_starts_or_resumes_a_run_in_the_user_s_folder(
    variables: dict[str, str], settings: tuple[str, ...], runs_dir: str
) -> None:
    text = SCRIPT.read_text()
    call = text[text.index("settings=(") : text.index("driver=$!")]
    script = (
        f"sluice() {{ printf '%s\\n' \"$@\"; }}\nconfig=$1 run_id=one services=own host=h port=1\nshift\n{call}wait"
    )
    command = ["bash", "-euc", script, "bash", "train.toml", *settings]
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = parse(["sluice", *done.stdout.splitlines()])
    assert (found["config_path"], found["run_id"], found["resumes"]) == ("train.toml", "one", True)
    assert settings_are_accepted(found["overrides"]).runtime.runs_dir == runs_dir  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "variables", "status", "requeues"),
    [
        ("RUNNING", {}, 143, True),
        ("RUNNING", {}, 0, False),
        ("RUNNING", {"MAX_REQUEUES": "0"}, 143, False),
        ("RUNNING", {"SLURM_RESTART_COUNT": "19"}, 143, True),
        ("RUNNING", {"SLURM_RESTART_COUNT": "20"}, 143, False),
        ("CANCELLED", {}, 143, False),
        ("PENDING", {}, 143, False),
    ],
)
def test_a_job_requeues_itself_before_its_time_limit(
    state: str, variables: dict[str, str], status: int, requeues: bool
) -> None:
    """Not if its run was complete by then or it was cancelled, nor if Slurm has requeued it after a preemption."""
    text = SCRIPT.read_text()
    own = text[text.index("driver= ") : text.index("start_ray()")].replace("trap 'kill $(jobs -p)", "#")
    stand_ins = f"""
        sluice() {{ trap 'exit {status}' TERM; echo started; while :; do sleep 0.05; done; }}
        scontrol() {{ echo "scontrol $*"; [[ $1 != show ]] || echo "   JobState={state} Reason=None"; }}
        config=tiny.toml run_id=one services=own host=h port=1
    """
    command = ["bash", "-euo", "pipefail", "-c", stand_ins + own + text[text.index("settings=(") :]]
    environment = {"PATH": os.environ["PATH"], **JOB, **variables}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "started\n"
        job.terminate()  # as of --signal=B:TERM@120
        printed = job.stdout.read()
    assert job.returncode == status
    assert (f"scontrol requeue {JOB['SLURM_JOB_ID']}" in printed) == requeues


def test_slurm_s_options() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPT.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"  # one Ray node on each machine
    assert options["signal"].startswith("B:TERM@")  # to the script, which ends the driver
    assert {"requeue", "exclusive"} <= options.keys()
    assert set(options) <= {
        *(
            "job-name",
            "nodes",
            "ntasks-per-node",
            "gpus-per-node",
            "exclusive",
            "time",
            "requeue",
            "open-mode",
            "signal",
        )
    }
