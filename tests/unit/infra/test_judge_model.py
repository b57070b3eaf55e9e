"""Judges that the run hosts: a tiny one whose score is known, in this process."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from infra.rewards.open import open_reward_scorer
from infra.workers.reward import RewardWorker, open_model_here
from rl_core.rewards import RewardItem, RewardOutcome, load_reward
from rl_core.rewards.judge_model import Answer, JudgeModel, Question
from schemas.config.reward import JudgeReward, WeightedReward
from schemas.errors import ModelError
from schemas.step import RunHandle
from tests.support.configs import run_config
from tests.support.judge_models import (
    NUM_AROUND,
    PROMPT,
    assert_a_judge_scores_all_responses,
    judge,
    make_judge,
    outcome_of,
    scores,
)
from tests.support.tiny import make_tiny_model, make_tiny_reward_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("judge"))


def test_a_judge_scores_all_responses_to_a_prompt(folder: Path) -> None:
    assert_a_judge_scores_all_responses(folder, "transformers")


def test_a_group_is_asked_in_one_call_of_its_own(folder: Path) -> None:
    function, calls = JudgeModel(judge(folder)), []

    def generate(questions: Sequence[Question]) -> list[Answer]:
        calls.append([len(question.token_ids) for question in questions])
        return [Answer(function.tokenizer("7")["input_ids"], is_cut=False) for _ in questions]

    function.load(generate)
    assert [score["reward"] for score in function.score("p", ["a", "bb", "a"], "a")] == [0.7] * 3
    assert function.score("p", ["x" * 200], "a")[0].args[0].startswith("the question to the judge has")
    assert calls == [[NUM_AROUND + 1, NUM_AROUND + 2]]  # equal ones once; none if all are too long


def test_a_sampled_answer_depends_on_its_question_alone(tmp_path: Path) -> None:
    random = make_tiny_model(tmp_path / "random")
    config = judge(random, temperature=1.0, max_tokens=200, pattern="(.)?", max_question_tokens=60)
    function = JudgeModel(config)
    seeds: list[list[int]] = []

    def generate(questions: Sequence[Question]) -> list[Answer]:
        seeds.append([question.seed for question in questions])
        return [Answer([5], is_cut=True) for _ in questions]

    function.load(generate)
    for responses in (["a", "b"], ["b"], ["c", "a"]):
        function.score("p", responses, "a")
    (a, b), (b_alone,), (c, a_again) = seeds
    assert (a, b) == (a_again, b_alone)
    assert len({a, b, c}) == 3


def test_other_scores_of_the_answer_are_failures(folder: Path) -> None:
    outside, missing = scores(judge(folder, scale=0.5), "a")[0], scores(judge(folder, pattern="Score: (.)"), "a")[0]
    assert "score 4 is not from 0 to reward.scale = 0.5" in (outside.failure or "")
    assert "the judge's answer has no score, as reward.pattern finds it: '4'" in (missing.failure or "")


def test_a_judge_in_a_weighted_sum_has_its_costs_as_parts(folder: Path) -> None:
    parts = {
        "liked": {"weight": 2, "reward": judge(folder).model_dump()},
        "exact": {"weight": 1, "reward": {"kind": "exact"}},
    }
    found, failed = scores(WeightedReward.model_validate({"parts": parts}), "a", "#")
    expected = outcome_of("a")
    costs = {f"liked_{name}": value for name, value in expected.parts.items()}
    assert found == RewardOutcome(2 * expected.reward + 1, {"exact": 1.0, "liked": expected.reward, **costs})
    assert (failed.failure or "").startswith("RuntimeError: part 'liked' failed: ValueError: the judge's answer is cut")
    parts["liked_judge_prompt_tokens"] = {"weight": 0, "reward": {"kind": "exact"}}
    (twice,) = scores(WeightedReward.model_validate({"parts": parts}), "a")
    assert twice.failure == "RuntimeError: two parts are named 'liked_judge_prompt_tokens': rename one of them"


def test_a_judge_that_moves_out_scores_the_same(folder: Path) -> None:
    config = run_config(reward=judge(folder).model_dump())
    worker = RewardWorker(
        RunHandle(run_id="judged", identity="judged", config=config, directory="", store_incarnation="")
    )
    worker.start()
    item = RewardItem("p", ["a", "bb"], "a", {})
    before = worker.score(item)
    assert before.group == (outcome_of("a"), outcome_of("bb"))
    slept = worker.sleep(("weights",))
    assert slept.moved["weights"] > 0
    assert slept.resident == {"weights": 0}
    assert worker.wake(("weights",)).resident == slept.moved
    assert worker.score(item) == before
    worker.sleep(("weights",))
    assert worker.score(item) == before  # a call moves in what it needs


def changed(folder: Path, to: Path, **fields: object) -> str:
    """Copy a model with other fields of its config; return the copy."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


def test_what_is_no_judge_is_refused_before_a_run(folder: Path, tmp_path: Path) -> None:
    plain = Path(changed(folder, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    silent, strict = (Path(changed(folder, tmp_path / name)) for name in ("silent", "strict"))
    (silent / "chat_template.jinja").write_text("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    (strict / "chat_template.jinja").write_text("{{ raise_exception('a system message first, please') }}")
    for path, fields, text in (
        (str(tmp_path / "absent"), {}, "no such folder"),
        (str(silent), {}, "leaves out the text of the user's message"),
        (str(strict), {}, "a system message first, please"),
        (str(make_tiny_reward_model(tmp_path / "reward")), {}, "is Qwen3ForSequenceClassification, expected"),
        (str(plain), {}, "the tokenizer has no chat template"),
        (
            changed(folder, tmp_path / "short", max_position_embeddings=50),
            {},
            r"has 50 positions, fewer than reward\.max_question_tokens \+ reward\.max_tokens = 108",
        ),
        (
            str(folder),
            {"chat_template_kwargs": {"enable_thinking": False}},
            r"reward\.chat_template_kwargs: the model's chat template has no variable enable_thinking",
        ),
    ):
        with pytest.raises(ModelError, match=text) as caught:
            load_reward(judge(path, **fields))
        assert str(caught.value).startswith(f"reward.path {path}: ")
        assert "\n" not in str(caught.value)


def test_a_judge_without_weights_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    empty = Path(changed(folder, tmp_path / "empty"))
    (empty / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"reward\.path .*: the judge's engine, transformers, can't start"):
        open_reward_scorer(judge(empty), open_model_here)


def test_settings_that_dont_belong_together_are_refused(folder: Path) -> None:
    endpoint = {"url": "http://localhost/v1", "model": "wise", "prompt": PROMPT}
    with pytest.raises(ValidationError, match='set kind = "judge_model" and leave url and model out'):
        JudgeReward.model_validate(endpoint | {"path": "folder"})
    for name, value in (("url", "http://localhost/v1"), ("concurrency", 4), ("api_key_variable", "KEY")):
        with pytest.raises(ValidationError, match=f"{name}\n  Extra inputs are not permitted"):
            judge(folder, **{name: value})
    with pytest.raises(ValidationError, match=r"gpu_memory_utilization = 0\.5 is a setting of engine"):
        judge(folder, gpu_memory_utilization=0.5)
    with pytest.raises(ValidationError, match="add_generation_prompt can't be set"):
        judge(folder, chat_template_kwargs={"add_generation_prompt": False})
    with pytest.raises(ValidationError, match='a judge with engine = "vllm" keeps its memory'):
        run_config(reward=judge(folder, engine="vllm").model_dump(), runtime={"placement": "colocated"})


def test_thinking_is_a_variable_of_the_template(folder: Path, tmp_path: Path) -> None:
    path = Path(changed(folder, tmp_path / "thinking"))
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template + "{% if enable_thinking %}y{% else %}n{% endif %}")
    for thinks, last in ((True, "y"), (False, "n")):
        config = judge(path, chat_template_kwargs={"enable_thinking": thinks})
        assert scores(config, "a")[0].reward == outcome_of(last).reward
    assert outcome_of("y").reward != outcome_of("n").reward
