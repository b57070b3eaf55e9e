"""Runs whose scores are over what truncated sampling left: by two ranks with a reference; of several turns."""

import numpy as np
import pytest

from infra.models.load import load_model
from infra.stores.offline import read_step
from schemas.config.model import ModelConfig
from tests.support.commands import sluice_in_turn
from tests.support.engine_checks import plain_logprobs
from tests.support.run_results import Run
from tests.support.workplace import Workplace

STEPS, STOPS = 3, list(range(64))
COLUMNS = ("response_ids", "sampling_mask_counts", "sampling_mask_ids", "sampler_logprobs", "behavior_logprobs")
SETTINGS = ("rollout.top_p=0.8", "rollout.min_p=0.02", "rollout.sampling_mask=true", "loss.behavior=recompute")


@pytest.fixture(scope="module")
def masked(workplace: Workplace) -> Run:
    others = ("kl.coef=0.05", "loss.entropy_coef=0.01", "runtime.num_policy_ranks=2", "store.keep_steps=all")
    workplace.sluice("train", "tiny.toml", f"steps={STEPS}", *SETTINGS, *others, "--run-id", "masked")
    return workplace.run("masked")


def test_engine_trainer_and_reference_score_over_the_same_tokens(masked: Run) -> None:
    for step, metrics in enumerate(masked.step_metrics()):
        assert metrics["mismatch/max"] < 1e-4
        assert (metrics["kl"] < 1e-6) == (step == 0)
        assert (metrics["ratio"], metrics["ratio_max"]) == (1.0, 1.0)


def test_the_ratio_of_trainer_and_sampler_is_1_only_over_the_mask(workplace: Workplace, masked: Run) -> None:
    model, over_all, over_mask = load_model(ModelConfig(path=str(workplace.folder / "model"))), [], []
    for row in read_step(masked.path, 0, columns=(*COLUMNS, "prompt_ids")).to_pylist():
        sampler = np.array(row["sampler_logprobs"])
        scored = plain_logprobs(model, row["prompt_ids"], np.array(row["response_ids"]), 1.0)
        over_all.append(np.exp(scored - sampler))
        over_mask.append(np.exp(np.array(row["behavior_logprobs"]) - sampler))
    assert np.abs(np.concatenate(over_mask) - 1).max() < 1e-4
    ratios = np.concatenate(over_all)
    assert ratios.max() < 1 + 1e-5  # tokens are cut, and none is added
    assert np.mean(ratios < 0.9) > 0.5


def test_each_token_is_one_that_could_be_sampled(masked: Run) -> None:
    for row in read_step(masked.path, STEPS - 1, columns=COLUMNS).to_pylist():
        start, ids = 0, row["sampling_mask_ids"]
        for token, count, *logprobs in zip(*(row[name] for name in COLUMNS if name != COLUMNS[2]), strict=True):
            assert token in ids[start : start + count]
            assert (count == 1) == (max(map(abs, logprobs)) < 1e-6)
            start += count
        assert start == len(ids)


@pytest.fixture(scope="module")
def of_turns(workplace: Workplace) -> Run:
    environment = 'environment={kind="class", path="tests.support.games:Asking", max_turn_tokens=12}'
    settings = (*SETTINGS, environment, 'reward={kind="environment"}', "rollout.max_response_tokens=60")
    others = ("steps=2", "eval.every_steps=0", f"rollout.stop_token_ids={STOPS}", "loss.observation_coef=0.1")
    workplace.sluice("train", "tiny.toml", *settings, *others, "store.keep_steps=all", "--run-id", "masked-turns")
    return workplace.run("masked-turns")


def test_tokens_between_turns_are_scored_over_all(of_turns: Run) -> None:
    for metrics in of_turns.step_metrics():
        assert metrics["turns"] > 1.2
        assert metrics["mismatch/max"] < 1e-4  # engine and trainer score over the same tokens
        assert (metrics["ratio"], metrics["ratio_max"]) == (1.0, 1.0)
    for row in read_step(of_turns.path, 1, columns=(*COLUMNS, "loss_mask")).to_pylist():
        start, ids = 0, row["sampling_mask_ids"]
        for token, is_sampled, count in zip(
            *(row[name] for name in ("response_ids", "loss_mask", COLUMNS[1])), strict=True
        ):
            assert is_sampled == (count > 0) == (token in ids[start : start + count])
            start += count
        assert start == len(ids)


def test_replays_have_the_same_bits(workplace: Workplace, masked: Run, of_turns: Run) -> None:
    query = ("sql", masked.run_id, "select min(sampling_mask_counts) > 0 from tokens")
    replays = (("replay", run.run_id, "--steps", "1") for run in (masked, of_turns))
    *replayed, (code, asked) = sluice_in_turn(workplace, *replays, query)
    for ended, printed in replayed:
        assert (ended, "same bits" in printed) == (0, True), printed
    assert (code, asked.split()[-1]) == (0, "True")
