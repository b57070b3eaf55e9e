"""A run whose directory is in an S3 bucket, killed on one machine and resumed on another: it ends as a local one."""

from collections.abc import Iterator

import pytest

from infra.storage.run_list import run_status
from tests.support.run_results import Run
from tests.support.s3 import s3_in_environment
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, BUCKET, RUN_ID = 3, "training", "moved"
CONFIG = ("train", "tiny.toml", f"steps={STEPS}", "reward.path=tiny_rewards:switched", "reward.timeout_seconds=inf")
POLL_SECONDS = 0.1  # each poll is a request to the bucket
RUNS_DIR = f"s3://{BUCKET}/runs"
URL = f"{RUNS_DIR}/{RUN_ID}"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workplace, Workplace]]:
    """Two machines that share nothing but the bucket: each has files, a Ray and a Prefect server of its own."""
    with s3_in_environment(BUCKET):
        places = [Workplace(tmp_path_factory.mktemp(f"machine-{number}")) for number in (1, 2)]
        yield places[0], places[1]
        for place in places:
            place.close()


@pytest.fixture(scope="module")
def expected(machines: tuple[Workplace, Workplace]) -> Run:
    """An undisturbed run in a local folder."""
    first, _ = machines
    first.sluice(*CONFIG, "--run-id", "undisturbed")
    return first.run("undisturbed")


def test_a_run_is_moved_from_machine_to_machine(machines: tuple[Workplace, Workplace], expected: Run) -> None:
    first, second = machines
    run = Run(URL)
    driver = first.start(*CONFIG, "--run-id", RUN_ID, f"runtime.runs_dir={RUNS_DIR}")
    driver.wait_for(lambda: run.passed(0, "rollout"), POLL_SECONDS)
    driver.wait_standing(lambda: run.num_done == 1 and run.committed(1, "advantage"))
    driver.kill()
    for service in ("ray", "prefect"):
        first.kill_service(service)
    left = run.entries(1)
    assert {name.partition("-")[0] for name in left} >= {"rollout", "put", "advantage"}
    (hold := second.folder / "hold").touch()
    paused = second.start("resume", URL)

    def is_done_by_what_was_left() -> bool:
        now = run.entries(1)
        if run.num_done == 2:  # asked last: then the entries may be dropped
            return True
        assert left.items() <= now.items()  # what was committed is not done again
        return False

    paused.wait_for(is_done_by_what_was_left, POLL_SECONDS)  # its next rollout does not end
    assert "which has not released it: waiting 30 s" in paused.printed
    paused.wait_for(lambda: run_status(run).state == "running")  # its beats may be late
    paused.suspend()
    first.sluice("resume", URL)
    paused.resume()
    assert "RunTakenOverError: another driver has taken over" in paused.finish(exit_code=1)
    hold.unlink()

    assert run.weights(STEPS) == expected.weights(STEPS)
    assert run.step_metrics() == expected.step_metrics()
    assert [report.plan for report in run.metrics.steps()] == [report.plan for report in expected.metrics.steps()]
    assert run.evaluations() == expected.evaluations()
    assert run.store_bytes_at_end() == 0
    assert [event.kind for event in run.metrics.events()] == ["start", "resume", "resume"]
    assert run.ledger.steps() == []
    assert not (second.folder / "runs").exists()


def test_every_command_finds_it(machines: tuple[Workplace, Workplace], expected: Run) -> None:
    _, second = machines
    assert run_status(Run(URL)).state == "finished"
    assert f"{STEPS}/{STEPS}" in second.sluice("runs", "--runs-dir", RUNS_DIR)
    assert "response_ids" in second.sluice("inspect", RUN_ID, "--runs-dir", RUNS_DIR)
    assert f"wrote {URL}/report.html" in second.sluice("report", URL)
    assert f"policy version {STEPS}: accuracy" in second.sluice("eval", URL)
    assert f"wrote policy version {STEPS}" in second.sluice("export", URL, "weights")
    # Machine 2 still has the workers of the driver that was replaced: it may not know whether they are used.
    assert second.sluice("stop", URL) == f"stopped {RUN_ID}; resume with: sluice resume {URL}\n"
    assert second.sluice("ps", "--json").strip() == "[]"
