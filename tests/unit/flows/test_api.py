"""`train_run` and `run_pipeline`: which functions other processes find, and what is refused before anything starts."""

import asyncio
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flows import run_pipeline, train_run
from flows.api import import_path
from flows.recovery import is_resumable
from infra.rewards.open import check_reward
from infra.storage.runs import RunDirectory
from schemas.config.reward import FunctionReward
from schemas.errors import ConfigError, RewardImportError, RunError, RunTakenOverError, WorkerLostError
from tests.support.configs import run_config
from tests.support.tiny import make_tiny_model


def test_a_function_of_a_module_is_found_by_its_name() -> None:
    assert import_path(make_tiny_model) == "tests.support.tiny:make_tiny_model"


@pytest.mark.parametrize(
    "reward", [lambda *_: 0.0, partial(make_tiny_model), "".join], ids=["lambda", "partial", "method"]
)
def test_what_no_other_process_finds_is_refused(reward: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="not a function defined by `def` at the top of a script or module"):
        import_path(reward)


SCORES = """
from functools import wraps

def clipped(score):
    @wraps(score)
    def clip(*args):
        return min(score(*args), 1.0)
    return clip

def score(*_):
    return 2.0

strict = score

def score(*_):
    return 3.0

clipped_score = clipped(score)

@clipped
def decorated(*_):
    return 4.0
"""


def test_a_function_whose_name_is_another_ones_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scores_of_one_name.py").write_text(SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    scores = importlib.import_module("scores_of_one_name")
    for reward in (scores.strict, scores.clipped_score):
        with pytest.raises(ConfigError, match="is not what score is in scores_of_one_name"):
            import_path(reward)
    assert import_path(scores.decorated) == "scores_of_one_name:decorated"
    before = scores.score
    assert import_path(before) == "scores_of_one_name:score"
    loaded = importlib.reload(scores)
    before.__code__ = loaded.score.__code__  # as IPython's autoreload does
    assert import_path(before) == "scores_of_one_name:score"


def test_in_a_running_event_loop_the_other_call_is_named() -> None:
    for call in (train_run, run_pipeline):

        async def cell(call: Callable[..., Any] = call) -> None:
            call({})

        with pytest.raises(ConfigError, match=f"await {call.__name__}_async"):
            asyncio.run(cell())


def test_a_wrong_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"config: unknown key stages.sft.modl; did you mean 'model'"):
        run_pipeline({"name": "sums", "stages": {"sft": {"config": "sft.toml", "modl": "m"}}})
    with pytest.raises(ConfigError, match=r"config: .*optim.*did you mean 'lr'"):
        train_run({"optim": {"lrr": 1}})


def test_a_reward_process_that_imports_an_unguarded_script_starts_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "from flows import train_run\ntrain_run({})\ndef score(*_):\n    return 0.0\n"
    (tmp_path / "unguarded_script.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardImportError, match="while unguarded_script is imported; call it under"):
        check_reward(FunctionReward(path="unguarded_script:score"))


def test_only_a_run_that_is_there_and_free_is_resumable(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    absent, stop = RunDirectory.at(config, "absent"), WorkerLostError("a worker died")
    assert not is_resumable(absent, stop)
    run = RunDirectory.create(config, "demo")
    assert is_resumable(run, stop)
    for error in (RunError("run demo is being driven by another process"), RunTakenOverError("taken over")):
        assert not is_resumable(run, error)
