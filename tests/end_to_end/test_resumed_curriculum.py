"""A curriculum over sources of which two have an environment of their own.

The second run goes back to an older checkpoint, takes the same rows again, and ends in the same weights.
"""

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest

from infra.stores.offline import read_step
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_data
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS, SAVED, KILLED = 6, 2, 4
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9"),
    *("runtime.max_staleness=1", "correction.kind=truncated", "eval.every_steps=0"),
    *("data.curriculum.window=2", "data.curriculum.success_threshold=0.95", "rollout.dynamic_sampling.max_rounds=2"),
)
STOPS = [*range(40), 259]  # a tiny model rarely ends a turn itself
GAMES = """
import os
from pathlib import Path

class Counting:
    '''Says the length of the turn; has so many turns.'''

    def __init__(self, task, seed, turns):
        Path(FOLDER, f"game-{os.getpid()}").touch()
        self._left, self._seed = turns, seed

    def reset(self):
        return f"I am {self._seed % 100}"

    def step(self, action):
        self._left -= 1
        return f"{len(action)} {self._seed % 10}", 0.5, self._left == 0
"""


def test_several_environments_play_the_same_rows_again(workplace: Workplace) -> None:
    (workplace.folder / "mixed_games.py").write_text(f"FOLDER = {str(workplace.folder)!r}\n{GAMES}")
    make_tiny_data(workplace.folder / "short.parquet", 12)
    make_tiny_data(workplace.folder / "long.parquet", 12)
    environment = (
        'environment={{kind="class", path="mixed_games:Counting", arguments={{turns={}}}, max_turn_tokens=12}}'
    )
    sources = [
        '{path="short.parquet", weight=2.0, ' + environment.format(1) + "}",
        '{path="long.parquet", ' + environment.format(3) + "}",
        '{path="train.parquet"}',
    ]
    mixed = (
        *("data.train_path=", "data.eval_path=", f"data.sources=[{', '.join(sources)}]"),
        *(
            "data.curriculum.kind=sources",
            "rollout.max_response_tokens=60",
            f"rollout.stop_token_ids={STOPS}",
            "store.keep_steps=all",
        ),
    )
    workplace.sluice(*CONFIG, *mixed, "--run-id", "games")
    expected = workplace.run("games")
    shares = {report.sources.schedule.shares for report in expected.metrics.steps() if report.sources}
    assert len(shares) > 1
    turns = {len(row["turn_tokens"]) for step in range(STEPS) for row in rows_of(expected, step)}
    assert {1, 3} <= turns

    run = killed_and_resumed(
        workplace,
        mixed,
        "games-killed",
    )
    assert [report.sources for report in run.metrics.steps()] == [report.sources for report in expected.metrics.steps()]
    for step in range(SAVED, STEPS):
        assert rows_of(run, step) == rows_of(expected, step)
    assert run.weights(STEPS) == expected.weights(STEPS)


def killed_and_resumed(workplace: Workplace, settings: Sequence[str], run_id: str) -> Run:
    """Kill environments, a rollout worker and the driver of a run, and resume it from an older checkpoint."""
    run = workplace.run(run_id)
    for file in workplace.folder.glob("game-*"):  # of the run before, whose ids other processes may have by now
        file.unlink()
    driver = workplace.start(*CONFIG, *settings, "--run-id", run_id)
    driver.wait_for(lambda: run.passed(0, "rollout"))
    playing = [pid for pid in players(workplace) if psutil.pid_exists(pid)]
    assert playing
    for pid in playing:
        with suppress(ProcessLookupError):  # it has ended since then
            os.kill(pid, signal.SIGKILL)
    driver.wait_for(lambda: run.passed(1, "rollout"))
    workplace.kill_worker("RolloutWorker")  # rows that are not put yet are sampled again
    driver.wait_standing(lambda: run.passed(KILLED, "rollout") and run.num_done < STEPS)
    driver.kill()
    workplace.stop_ray()
    for folder in ("ledger", "columns", "journal"):  # so that rollouts are repeated, too
        for step in (run.path / folder).glob("step-*"):
            shutil.rmtree(step)
    for version in range(SAVED + 1, STEPS):
        shutil.rmtree(run.path / "policy" / f"step-{version:06d}", ignore_errors=True)
    workplace.sluice("resume", run_id)
    return run


def players(workplace: Workplace) -> list[int]:
    """Return the ids of all processes that environments have been in; not all live."""
    return [int(file.name.removeprefix("game-")) for file in workplace.folder.glob("game-*")]


def rows_of(run: Run, step: int) -> list[dict]:
    columns = ("sample_id", "response_ids", "loss_mask", "sampler_logprobs", "turn_tokens", "turn_rewards", "reward")
    return read_step(run.path, step, [*columns, "episode_end", "info"]).to_pylist()
