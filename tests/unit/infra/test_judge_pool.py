"""A judge that reward processes ask: when it is down, late or back again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.rewards import RewardScorer
from infra.rewards.open import open_reward_scorer
from infra.rewards.pool import RewardPool
from rl_core.rewards import RewardOutcome
from schemas.config.judge import JudgeReward
from schemas.errors import ConfigError, ServiceError
from schemas.rollout import RolloutHandle
from tests.support.judge_server import PROMPT, READY_QUESTION, JudgeServer, served
from tests.support.progress import wait_until
from tests.support.reward_pools import LATE, LIMIT_SECONDS, items, rewards
from tests.support.rollout_workers import GROUPS, make_folder, open_store, rows_of, run_of, worker_of


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with served() as one:
        yield one


@contextmanager
def judged_by(server: JudgeServer, **changes: object) -> Iterator[RewardScorer]:
    fields = {"url": server.url, "model": "wise", "prompt": PROMPT, "max_retries": 0}
    scorer = open_reward_scorer(JudgeReward.model_validate(fields | changes))
    try:
        yield scorer
    finally:
        scorer.close()


@pytest.mark.parametrize("limits", [{}, {"num_processes": 0, "timeout_seconds": None}])
def test_a_judge_scores_batch_by_batch(server: JudgeServer, limits: dict) -> None:
    with judged_by(server, **limits) as scorer:
        scorer.wait_until_ready()
        assert [request["question"] for request in server.requests] == [READY_QUESTION]
        costs = {"judge_prompt_tokens": 6.0, "judge_completion_tokens": 1.0}
        assert scorer.score(items("5", "10")) == [RewardOutcome(0.5, costs), RewardOutcome(1.0, costs)]
        assert scorer.score(items("5")) == [RewardOutcome(0.5, dict.fromkeys(costs, 0.0))]
        assert sorted(server.questions) == ["10", "5"]  # both are asked at once


@pytest.mark.parametrize("limits", [{}, {"num_processes": 0, "timeout_seconds": None}])
def test_a_judge_that_is_down_at_the_start_says_so(limits: dict) -> None:
    with served() as server:
        pass
    with judged_by(server, **limits) as scorer, pytest.raises(ServiceError) as caught:
        scorer.wait_until_ready()
    assert f"the judge at {server.url}/chat/completions failed 1 times" in str(caught.value)
    assert "see that it runs, or change reward.url" in str(caught.value)


def test_a_missing_key_is_an_error_of_its_own(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    unset = pytest.raises(ConfigError, match=r"reward\.api_key_variable = 'JUDGE_KEY' is not set")
    with judged_by(server, api_key_variable="JUDGE_KEY") as scorer, unset:
        scorer.wait_until_ready()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judged_by(server, api_key_variable="JUDGE_KEY") as scorer:
        assert rewards(scorer, "5") == [0.5]
    assert {request["key"] for request in server.requests} == {"Bearer secret"}


def test_a_judge_that_goes_down_costs_only_the_rows_of_that_time(server: JudgeServer) -> None:
    with judged_by(server) as scorer:
        assert isinstance(scorer, RewardPool)
        assert rewards(scorer, "5") == [0.5]
        pids = scorer.pids
        server.is_down = True
        lost, known = scorer.score(items("6", "5"))
        assert lost.reward is None
        assert "ServiceError: the judge at" in (lost.failure or "")
        assert "HTTP status 503" in (lost.failure or "")
        assert known.reward == 0.5
        server.is_down = False
        assert rewards(scorer, "6") == [0.6]
        assert scorer.pids == pids


def test_a_lost_connection_is_opened_again() -> None:
    with served() as server, judged_by(server, max_retries=5) as scorer:
        assert rewards(scorer, "5") == [0.5]
        port = server.server_port
        server.shutdown()
        server.server_close()
        with served(port):
            assert rewards(scorer, "6") == [0.6]


def test_the_time_limit_begins_with_a_responses_own_request(server: JudgeServer) -> None:
    with judged_by(server, concurrency=1, timeout_seconds=LIMIT_SECONDS) as scorer:
        scorer.wait_until_ready()
        assert scorer.score(items("hang"))[0] == LATE
        outcomes = scorer.score(items("hang 1", "hang 2", "3"))
    assert outcomes[:2] == [LATE, LATE]
    assert outcomes[2].reward == 0.3


def test_a_pause_that_takes_all_of_the_time_is_named(server: JudgeServer) -> None:
    with judged_by(server, max_retries=5, timeout_seconds=LIMIT_SECONDS) as scorer:
        (outcome,) = scorer.score(items("busy"))
    assert outcome.reward is None
    assert outcome.failure is not None
    assert f"{LATE.failure}; the judge at {server.url}/chat/completions answered last with" in outcome.failure
    assert "HTTP status 429" in outcome.failure
    assert outcome.failure.endswith("asks for a pause of 300 s: lower reward.concurrency")


def test_a_process_that_takes_the_place_of_another_asks_no_judge_that_may_be_busy(server: JudgeServer) -> None:
    with judged_by(server, num_processes=1) as scorer:
        scorer.wait_until_ready()
        assert isinstance(scorer, RewardPool)
        (pid,) = scorer.pids
        server.is_down = True
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}/stat").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())
        (outcome,) = scorer.score(items("5"))
        assert outcome.failure is not None
        assert "failed 1 times" in outcome.failure
        assert scorer.pids != [pid]
        server.is_down = False
        assert scorer.score(items("5"))[0].reward == 0.5
    assert [request["question"] for request in server.requests].count(READY_QUESTION) == 1


def test_one_process_keeps_to_its_number_of_requests(server: JudgeServer) -> None:
    with judged_by(server, concurrency=3) as scorer, scorer.open_batch() as batch:
        wait_until(lambda: server.requests and not server.num_open)
        server.gate.clear()
        for number, item in enumerate(items(*map(str, range(10)))):
            batch.add(number, item)
        wait_until(lambda: server.num_open == 3)
        server.gate.set()
        found = batch.finish()
    assert [found[number].reward for number in range(10)] == [number / 10 for number in range(10)]
    assert server.max_open == 3


def test_the_rows_of_a_step_have_scores_and_costs(server: JudgeServer, tmp_path: Path) -> None:
    fields = {"url": server.url, "model": "wise", "prompt": "{response} Response: {answer}"}  # an answer is 1 to 7
    run = run_of(make_folder(tmp_path))
    run = run.replace(config=run.config.replace(reward=JudgeReward.model_validate(fields)))
    store = open_store()
    worker = worker_of(run, store=store)
    shard = worker.generate(0, 0, 0, GROUPS)
    for row in rows_of(store, worker, shard).values():
        assert row["reward"] == pytest.approx(int(row["answer"]) / 10)
        assert row["reward_judge_completion_tokens"] in (0, 1)
    assert RolloutHandle(step=0, policy_version=0, shards=(shard,)).metrics["reward_judge_prompt_tokens"].weight == 15
    worker.close()
