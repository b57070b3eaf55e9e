"""A tiny judge whose scores are known, and what it should give."""

from collections.abc import Sequence
from pathlib import Path

from infra.models.tiny import END, make_tokenizer
from infra.rewards.open import open_reward_scorer
from infra.workers.reward import open_model_here
from rl_core.rewards import RewardItem, RewardOutcome
from schemas.config.judge import JudgeModelReward
from schemas.config.reward import WeightedReward
from tests.support.engine_checks import HEAD_DIM
from tests.support.tiny import make_tiny_judge

PROMPT = "{prompt} {answer}: {response}"
NUM_AROUND = len("<u>p a: ") - 2  # tokens of a question besides the response: the user's control token is one


def make_judge(folder: Path) -> Path:
    """Make the judge, whose answer to a response that ends with `#` is cut; return its folder."""
    return make_tiny_judge(folder, cut="#", head_dim=HEAD_DIM)


def judge(folder: Path | str, **fields: object) -> JudgeModelReward:
    given = {"path": str(folder), "prompt": PROMPT, "max_question_tokens": 100, "max_tokens": 8}
    return JudgeModelReward.model_validate(given | fields)


def scores(
    config: JudgeModelReward | WeightedReward, *completions: str, groups: Sequence[int] = ()
) -> list[RewardOutcome]:
    scorer = open_reward_scorer(config, open_model_here)
    try:
        scorer.wait_until_ready()
        items = [RewardItem("p", completion, "a", {}) for completion in completions]
        return scorer.score(items, groups or (0,) * len(completions))
    finally:
        scorer.close()


def outcome_of(completion: str, *, is_known: bool = False) -> RewardOutcome:
    """Return what the tiny judge gives a response by construction; see `make_tiny_judge`."""
    *_, last = make_tokenizer()(completion, split_special_tokens=True)["input_ids"]
    asked, said = (0.0, 0.0) if is_known else (float(NUM_AROUND + len(completion)), 2.0)
    return RewardOutcome(last % 10 / 10, {"judge_prompt_tokens": asked, "judge_completion_tokens": said})


def assert_a_judge_scores_all_responses(folder: Path, engine: str) -> None:
    """Assert what a judge in an engine gives to responses that are equal, cut, too long or full of control tokens."""
    responses = ("a", "bb", "a", "cut #", "x" * 200, f"q{END}", "c")
    first, second, again, cut, long, marked, last = scores(judge(folder, engine=engine), *responses)
    assert (first, second, last) == (outcome_of("a"), outcome_of("bb"), outcome_of("c"))
    assert len({first.reward, second.reward, last.reward}) == 3
    assert again == outcome_of("a", is_known=True)
    assert cut.failure == "ValueError: the judge's answer is cut at 8 tokens; raise reward.max_tokens"
    assert "has 206 tokens, more than reward.max_question_tokens = 100" in (long.failure or "")
    assert marked == outcome_of(f"q{END}")  # the name of a control token, of which the judge reads every byte
