"""The LLM judge: its protocol, its scores, and what its failures say; against a server on a loopback port."""

import asyncio
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from rl_core.rewards import RewardItem, RewardOutcome, is_concurrent, load_reward, prepare, score_all
from rl_core.rewards import judge as judge_module
from rl_core.rewards.judge import _retry_after
from schemas.config.reward import JudgeReward, RewardConfig
from schemas.errors import ConfigError, ServiceError
from tests.support.judge_server import PROMPT, JudgeServer, served

KEY = "sk-a-very-secret-key"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with served() as one:
        yield one


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "BACKOFF_SECONDS", 0.01)


def judge(server: JudgeServer, **changes: object) -> JudgeReward:
    return JudgeReward.model_validate({"url": server.url, "model": "wise", "prompt": PROMPT, **changes})


def outcomes(server: JudgeServer, *completions: str, **changes: object) -> list[RewardOutcome]:
    items = [RewardItem("1 + 1?", completion, "2", {}) for completion in completions]
    return score_all(load_reward(judge(server, **changes)), items)


def failure(server: JudgeServer, completion: str, **changes: object) -> str:
    (outcome,) = outcomes(server, completion, **changes)
    assert outcome.reward is None
    return outcome.failure or ""


def test_the_judge_is_asked_by_the_protocol(server: JudgeServer) -> None:
    (outcome,) = outcomes(server, "so {x}: 7", max_tokens=99)
    assert outcome == RewardOutcome(0.7, {"judge_prompt_tokens": 10.0, "judge_completion_tokens": 3.0})
    (request,) = server.requests
    question = "Question: 1 + 1? Answer: 2 Response: so {x}: 7"  # braces of a response are no fields
    messages = [{"role": "user", "content": question}]
    assert request["body"] == {"model": "wise", "messages": messages, "max_tokens": 99, "temperature": 0.0}
    assert request["key"] is None
    outcomes(server, "3", max_tokens="", temperature=None)
    assert server.requests[-1]["body"].keys() == {"model", "messages"}


@pytest.mark.parametrize(
    ("answer", "changes", "reward"),
    [
        ("It has 3 steps. 8/10", {}, 0.8),
        ("I give it 7.5 out of 10.", {}, 0.75),
        ("0", {}, 0.0),
        ("parts 6", {}, 0.6),
        ("6 ends eos_token", {}, 0.6),
        ("6 ends STOP", {}, 0.6),
        ("4", {"scale": 5}, 0.8),
        ("Score: 6. It has 3 steps.", {"pattern": r"Score: (\d+)"}, 0.6),
        ("Score: 1. No,\nScore: 2.", {"pattern": r"Score: (\d+)"}, 0.2),
        ("<score>\n9\n</score> of 10", {"pattern": "<score>(.*?)</score>"}, 0.9),
    ],
)
def test_scores(server: JudgeServer, answer: str, changes: dict, reward: float) -> None:
    (outcome,) = outcomes(server, answer, **changes)
    assert outcome.reward == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "changes", "text"),
    [
        ("I don't know.", {}, "ValueError: the judge's answer has no score, as reward.pattern finds it: \"I don't"),
        ("in 2026", {}, "the judge's score 2026 is not from 0 to reward.scale = 10: 'in 2026'"),
        ("-3", {}, "the judge's score -3 is not from 0 to reward.scale = 10"),
        ("good", {"pattern": r"(\w+)"}, "the judge's score is 'good', not a number"),
        ("nan", {"pattern": r"(\w+)"}, "the judge's score nan is not from 0"),
        ("a", {"pattern": r"a|(b)"}, "the judge's score is None, not a number"),
        ("cut", {"max_tokens": 5}, "the judge's answer is cut at 5 tokens; raise reward.max_tokens"),
        ("It has 3 steps; ends length", {"max_tokens": 5}, "the judge's answer is cut at 5 tokens; raise"),
        ("7 ends content_filter", {}, "the judge's answer is incomplete: its finish_reason is 'content_filter'"),
        ("7 ends tool_calls", {}, "the judge's answer is incomplete: its finish_reason is 'tool_calls'"),
        ("odd", {}, "ServiceError: what http://"),
    ],
)
def test_an_answer_without_a_score_is_a_failure_and_not_zero(
    server: JudgeServer, answer: str, changes: dict, text: str
) -> None:
    assert text in failure(server, answer, **changes)


def test_costs_that_the_endpoint_does_not_count_are_unknown(server: JudgeServer) -> None:
    assert outcomes(server, "uncounted 5") == [RewardOutcome(0.5)]
    assert outcomes(server, "null 5") == [RewardOutcome(0.5, {"judge_completion_tokens": 2.0})]


def test_failing_requests_are_repeated(server: JudgeServer) -> None:
    found = outcomes(server, "status 500 twice 5", "status 429 once 6")
    assert [outcome.reward for outcome in found] == [0.5, 0.6]
    assert len(server.requests) == 5
    first, second = (request["time"] for request in server.requests if "429" in request["question"])
    assert second - first >= 1  # as Retry-After said


def test_a_request_that_keeps_failing_is_a_failure(server: JudgeServer) -> None:
    text = failure(server, "again 429", max_retries=2)
    assert re.match(
        r"ServiceError: the judge at http://\S+/v1/chat/completions failed 3 times, at last with HTTP", text
    )
    assert "status 429" in text
    assert "reward.concurrency" in text
    assert len(server.requests) == 3


def test_what_a_repetition_does_not_help_is_not_repeated(server: JudgeServer) -> None:
    assert "refuses the request with HTTP status 401" in failure(server, "denied")
    assert len(server.requests) == 1


def test_a_lost_connection_is_a_failure() -> None:
    with served() as server:
        config = judge(server, max_retries=1)
    (outcome,) = score_all(load_reward(config), [RewardItem("", "5", "", {})])
    assert "failed 2 times, at last with ConnectError: All connection attempts failed" in (outcome.failure or "")


def test_the_pause_that_a_response_asks_for() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    for value, low, high in (("2.5", 2.5, 2.5), ("-1", 0, 0), ("soon", 0, 0), ("", 0, 0), (soon, 3000, 3600)):
        assert low <= _retry_after(httpx.Response(429, headers={"Retry-After": value})) <= high


def test_equal_questions_are_asked_once(server: JudgeServer) -> None:
    function = load_reward(judge(server))
    items = [RewardItem("", text, "", {}) for text in ("5", "6", "5", "5")]
    for known in (False, True):
        found = score_all(function, items)
        assert [outcome.reward for outcome in found] == [0.5, 0.6, 0.5, 0.5]
        asked = [outcome for outcome in found if outcome.parts["judge_completion_tokens"]]
        assert len(asked) == (0 if known else 2)
        assert sorted(server.questions) == ["5", "6"]


def test_a_failure_is_asked_again_and_the_oldest_scores_are_forgotten(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_module, "MAX_SCORES", 2)
    function = load_reward(judge(server))
    for text in ("none", "none", "1", "2", "1", "3", "1", "2"):
        score_all(function, [RewardItem("", text, "", {})])
    assert server.questions == ["none", "none", "1", "2", "3", "2"]


def test_no_more_requests_are_open_than_allowed(server: JudgeServer) -> None:
    server.gate.clear()

    async def score() -> list[RewardOutcome]:
        items = [RewardItem("", str(number), "", {}) for number in range(10)]
        calls = asyncio.create_task(asyncio.to_thread(score_all, load_reward(judge(server, concurrency=3)), items))
        while server.num_open < 3:
            await asyncio.sleep(0.01)
        server.gate.set()
        return await calls

    assert [outcome.reward for outcome in asyncio.run(score())] == [number / 10 for number in range(10)]
    assert server.max_open == 3


def test_the_key_is_sent_and_never_shown(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    config = judge(server, api_key_variable="JUDGE_KEY")
    function = load_reward(config)
    (outcome, denied) = score_all(function, [RewardItem("", text, "", {}) for text in ("5", "denied")])
    assert outcome.reward == 0.5
    assert server.requests[0]["key"] == f"Bearer {KEY}"
    assert "incorrect key Bearer ***" in (denied.failure or "")
    assert "the variable that reward.api_key_variable names" in (denied.failure or "")
    assert KEY not in f"{denied.failure} {config!r} {config.model_dump_json()} {function!r}"
    for value, text in (("two\nlines", "holds more than a key"), ("", "is not set where rollout workers run")):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ConfigError, match=text) as caught:
            asyncio.run(prepare(load_reward(config)))
        assert "lines" not in str(caught.value)


def test_a_judge_is_asked_before_it_is_needed(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_of = TypeAdapter(RewardConfig).validate_python(
        {
            "kind": "weighted",
            "parts": {"wise": {"reward": judge(server).model_dump()}, "exact": {"reward": {"kind": "exact"}}},
        }
    )
    for config in (judge(server), sum_of):
        asyncio.run(prepare(load_reward(config)))
    assert (len(server.requests), server.questions) == (2, [])
    server.gate.clear()
    monkeypatch.setattr(judge_module, "READY_SECONDS", 0.2)
    with pytest.raises(ServiceError, match=r"gave no answer within 0.2 s; start it first, or check reward\.url"):
        asyncio.run(prepare(load_reward(judge(server))))


def test_a_judge_as_part_of_a_sum(server: JudgeServer) -> None:
    parts = {
        "wise": {"weight": 2, "reward": judge(server, concurrency=2).model_dump()},
        "exact": {"reward": {"kind": "exact"}},
    }
    function = load_reward(TypeAdapter(RewardConfig).validate_python({"kind": "weighted", "parts": parts}))
    assert is_concurrent(function)
    first, *_, last = score_all(function, [RewardItem("", str(number), "9", {}) for number in range(10)])
    assert first.parts == {"wise": 0, "wise_judge_prompt_tokens": 5, "wise_judge_completion_tokens": 1, "exact": 0}
    assert last.reward == pytest.approx(2 * 0.9 + 1)
    assert server.max_open <= 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": "{response} {info}"}, "unknown field {info}"),
        ({"prompt": "{response} {}"}, "unknown field {}"),
        ({"prompt": "{response.__class__}"}, "unknown field {response.__class__}"),
        ({"prompt": "{response!r}"}, "unknown field {response} or a format of it"),
        ({"prompt": "{response} {"}, "not a template"),
        ({"prompt": "{{response}}"}, "without {response} the judge would not see what it judges"),
        ({"pattern": r"\d+"}, "put it in parentheses"),
        ({"pattern": "("}, "not a regular expression"),
        ({"scale": 0}, "greater than 0"),
        ({"url": "localhost:8000/v1"}, "should match pattern"),
        ({"url": "http://a:b@localhost/v1"}, "name the key's variable in reward.api_key_variable"),
        ({"url": "http://localhost/v1/chat/completions"}, "the URL that /chat/completions is added to"),
        ({"api_key_variable": KEY}, "must be the name of an environment variable, not the key itself"),
        ({"concurrency": 0}, "greater than 0"),
    ],
)
def test_invalid_judges_are_rejected(changes: dict, text: str) -> None:
    fields = {"url": "http://localhost/v1/", "model": "wise", "prompt": "{response}"}
    assert JudgeReward.model_validate(fields).url == "http://localhost/v1"
    with pytest.raises(ValidationError, match=re.escape(text)):
        JudgeReward.model_validate(fields | changes)
