"""Distillation from two teachers and from the policy itself: killed and resumed, replayed, and with two ranks."""

import json

import pytest

from infra.stores.offline import read_step
from tests.support.run_results import Run
from tests.support.tiny import make_tiny_model, tiny_row, write_rows
from tests.support.workplace import Workplace

pytestmark = pytest.mark.extended

STEPS = 3
TEACHERS = (
    "distillation.teachers.big={path='big', data_sources=['sums']}",
    "distillation.teachers.hinted={path='other', data_sources=['games'], prompt='{prompt} {answer}'}",
    "distillation.teachers.own={prompt='{prompt} The answer is {answer}.'}",
)
CONFIG = (
    *("train", "tiny.toml", f"steps={STEPS}", "data.train_path=mixed.parquet", "eval.every_steps=0"),
    *("store.keep_steps=all", "checkpoint.keep_last=9", "distillation.reward_weight=0.5", *TEACHERS),
)


@pytest.fixture(scope="module", params=["sampled", "js"])
def divergence(request: pytest.FixtureRequest) -> str:
    """What is minimized: the reverse KL by the sampled tokens, or a divergence over the teachers' likely tokens."""
    return str(request.param)


@pytest.fixture(scope="module")
def config(divergence: str) -> tuple[str, ...]:
    """The arguments of a run."""
    return *CONFIG, f"distillation.divergence={divergence}", "distillation.top_k=7"


@pytest.fixture(scope="module")
def expected(workplace: Workplace, divergence: str, config: tuple[str, ...]) -> Run:
    """An undisturbed run."""
    make_tiny_model(workplace.folder / "big", seed=7, hidden_size=32)
    make_tiny_model(workplace.folder / "other", seed=8)
    sources = ("sums", "games", "names")
    rows = [tiny_row(index, data_source=sources[index % 3]) for index in range(12)]
    write_rows(workplace.folder / "mixed.parquet", rows)
    workplace.sluice(*config, "--run-id", f"taught-{divergence}")
    return workplace.run(f"taught-{divergence}")


def test_every_row_has_its_teachers_logprobs_and_prompt(expected: Run, divergence: str) -> None:
    rows = read_step(expected.path).to_pylist()
    assert {json.loads(row["info"])["data_source"] for row in rows} == {"sums", "games", "names"}
    for row in rows:
        assert len(row["teacher_logprobs"]) == len(row["response_ids"])
        assert ("teacher_top_ids" in row) == (divergence == "js")
        for top in row.get("teacher_top_logprobs", []):
            assert len(top) == 7
            assert sorted(top, reverse=True) == top
        is_hinted = json.loads(row["info"])["data_source"] != "sums"
        assert (len(row["teacher_prompt_ids"]) > len(row["prompt_ids"])) == is_hinted
    for metrics in expected.step_metrics():
        assert metrics["teacher/kl"] > 0
        assert divergence == "sampled" or metrics["teacher/divergence"] > 0


def test_a_killed_run_ends_in_the_same_weights(workplace: Workplace, expected: Run, config: tuple[str, ...]) -> None:
    killed = f"{expected.path.name}-killed"
    run, driver = workplace.run(killed), workplace.start(*config, "--run-id", killed)
    driver.wait_for(lambda: run.passed(0, "update"))
    workplace.kill_worker("TeacherWorker", at_most=1)  # the driver starts it again
    driver.wait_for(lambda: run.passed(1, "teacher"), poll_seconds=0)
    driver.kill()
    workplace.sluice("resume", killed)
    assert run.weights(STEPS) == expected.weights(STEPS)
    assert run.step_metrics() == expected.step_metrics()


def test_a_replay_is_equal_bit_for_bit(workplace: Workplace, expected: Run) -> None:
    assert "1 steps replayed: same bits" in workplace.sluice("replay", expected.path.name, "--steps", "1")


def test_a_fork_ends_in_the_same_weights(workplace: Workplace, expected: Run) -> None:
    fork = workplace.run(f"{expected.run_id}-fork")
    workplace.sluice("fork", expected.run_id, "--at", "2", "--run-id", fork.run_id, "--start")
    assert fork.step_metrics() == expected.step_metrics()
    assert fork.weights(STEPS) == expected.weights(STEPS)


def test_two_ranks_of_policy_and_teacher_train_the_same_up_to_rounding(
    workplace: Workplace, expected: Run, config: tuple[str, ...]
) -> None:
    ranks = ("runtime.num_policy_ranks=2", "distillation.teachers.big.num_ranks=2", "packing.token_budget=64")
    run_id = f"{expected.path.name}-ranks"
    workplace.sluice(*config, *ranks, "distillation.teachers.own.max_prompt_tokens=40",
                     "distillation.teachers.hinted.max_prompt_tokens=40", "--run-id", run_id)  # fmt: skip
    first, second = (run.step_metrics()[0] for run in (expected, workplace.run(run_id)))
    for name in ("teacher/kl", "loss", "grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-4)
