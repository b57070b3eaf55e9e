"""The demo's problems and demonstrations, and its configs."""

import re
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.cli.commands import demo
from flows.cli.demo import TINY, demo_overrides, make_files, sft_overrides, work_out
from flows.configs import CONFIGS
from rl_core.rewards import RewardItem, load_reward, score_all
from schemas.config.load import load_config
from schemas.errors import ServiceError

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"


def sum_of(row: dict[str, Any]) -> str:
    return str(sum(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))))


def test_a_sum_is_worked_out_step_by_step() -> None:
    assert work_out([5, 9, 7, 10]) == "5+9=14, 14+7=21, 21+10=31"


def test_demonstrations_are_right_and_only_some_are_worked_out(tmp_path: Path) -> None:
    make_files(tmp_path, 3, TINY)
    assert (tmp_path / "random" / "model.safetensors").exists()
    names = ("heldout", "train", "demonstrations")
    heldout, train, shown = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in names)
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (heldout, train, shown)]
    assert prompts[0].isdisjoint(prompts[1] | prompts[2])
    assert all(row["reward_model"]["ground_truth"] == sum_of(row) for row in heldout + train)

    demonstrations = [row["completion"][0]["content"] for row in shown]
    items = [RewardItem("", text, sum_of(row), {}) for text, row in zip(demonstrations, shown, strict=True)]
    reward = load_reward(load_config(CONFIGS / "demo.toml").reward)
    assert {outcome.reward for outcome in score_all(reward, items)} == {1.0}
    worked = sum("+" in text for text in demonstrations) / len(demonstrations)
    assert worked == pytest.approx(TINY.worked_fraction, abs=0.05)


@pytest.mark.parametrize("tiny", [False, True])
def test_the_demo_trains_the_model_that_fine_tuning_wrote(tiny: bool) -> None:
    sft = load_config(CONFIGS / "demo_sft.toml", sft_overrides(3, tiny))
    config = load_config(CONFIGS / "demo.toml", demo_overrides(3, tiny))
    assert sft.sft is not None
    assert sft.seed == config.seed == 3
    assert Path(sft.model.path).parent == Path(config.model.path).parent == Path(sft.data.train_sources[0].path).parent


def test_the_example_has_the_demo_s_config() -> None:
    assert (EXAMPLE / "config.toml").read_text() == (CONFIGS / "demo.toml").read_text()


def test_a_demo_whose_services_do_not_start_says_for_what_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told, ended = threading.Event(), list[bool]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.cli.demo.make_inputs", lambda *_: ended.append(is_told.wait(60)))
    monkeypatch.setattr("flows.cli.commands.console.print", lambda text: "files are written" in text and is_told.set())
    with pytest.raises(ServiceError, match=r"http://127\.0\.0\.1:9/api"):
        demo(["services.prefect_api_url=http://127.0.0.1:9/api"], tiny=True)
    assert ended == [True]
