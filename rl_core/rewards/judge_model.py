"""The score of an LLM judge that an engine of the run generates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rl_core.rewards.base import Score
from rl_core.rewards.hosted import (
    GroupReward,
    build_on_meta,
    check_positions,
    describe_model,
    load_hosted_tokenizer,
    model_error,
    open_chat,
)
from rl_core.rewards.judge import Rubric
from rl_core.rollout.decoding import decode_text
from rl_core.rollout.seeding import derive_seed
from schemas.config.judge import JudgeModelReward


@dataclass(frozen=True)
class Question:
    """What the judge reads, and the seed of its answer."""

    token_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the judge says, and whether it is cut at `max_tokens`."""

    token_ids: list[int]
    is_cut: bool


Generate = Callable[[Sequence[Question]], Sequence[Answer]]
"""Returns the answer to each question; answers may depend, in their last bits, on the other questions."""


class JudgeModel(GroupReward):
    """Asks a judge about all responses to a prompt together; equal questions are asked once.

    Args:
        config: The judge, and how its score is read.

    Raises:
        ModelError: The folder has no causal language model, no tokenizer of it with a chat template that has the
            config's variables and writes the question, or too few positions for question and answer.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: JudgeModelReward) -> None:
        self._config, self._rubric = config, Rubric(config)
        self.tokenizer = load_hosted_tokenizer(config, build_meta_judge(config))
        if self.tokenizer.eos_token_id is None:
            raise model_error(
                config, "the tokenizer has no eos_token, so answers could never end; set it in tokenizer_config.json"
            )
        self._chat = open_chat(config, self.tokenizer, ("user",), config.chat_template_kwargs)
        self._generate: Generate | None = None

    def load(self, generate: Generate) -> None:
        """Have this function answer the questions."""
        self._generate = generate

    def score(self, prompt: str, completions: Sequence[str], answer: str) -> list[Score | Exception]:
        """Return each response's score divided by `scale`, and its tokens: none if its question was asked before it.

        See `GroupReward.score`.
        """
        texts = [self._rubric.question(prompt, completion, answer) for completion in completions]
        scores: dict[str, Score | Exception] = {}
        questions: dict[str, Question] = {}
        for text in dict.fromkeys(texts):
            try:
                questions[text] = Question(self._encode(text), derive_seed("judge", text))
            except ValueError as error:
                scores[text] = error
        answers = self._ask(list(questions.values())) if questions else ()
        for (text, question), said in zip(questions.items(), answers, strict=True):
            scores[text] = self._read(question, said)
        return [_without_costs(scores[text]) if text in texts[:at] else scores[text] for at, text in enumerate(texts)]

    def _ask(self, questions: Sequence[Question]) -> Sequence[Answer]:
        assert self._generate is not None, "the judge has no engine"
        return self._generate(questions)

    def _encode(self, question: str) -> list[int]:
        """Return the token ids of a question, in which a control token's name is text.

        Raises:
            ValueError: There are more than `max_question_tokens`, they can't be encoded as text, or the chat template
                rejects the question.
        """
        token_ids = self._chat.encode([{"role": "user", "content": question}])
        if len(token_ids) > (limit := self._config.max_question_tokens):
            raise ValueError(
                f"the question to the judge has {len(token_ids)} tokens, more than reward.max_question_tokens = {limit}"
            )
        return token_ids

    def _read(self, question: Question, answer: Answer) -> Score | Exception:
        if answer.is_cut:
            return ValueError(f"the judge's answer is cut at {self._config.max_tokens} tokens; raise reward.max_tokens")
        try:
            score = self._rubric.score(decode_text(self.tokenizer, answer.token_ids, skip_special_tokens=True))
        except ValueError as error:
            return error
        costs = {"prompt": len(question.token_ids), "completion": len(answer.token_ids)}
        return {"reward": score, **{f"judge_{name}_tokens": float(count) for name, count in costs.items()}}


def build_meta_judge(config: JudgeModelReward) -> PreTrainedModel:
    """Build the judge on the meta device: its parameters have shapes but no memory.

    Raises:
        ModelError: The folder has no causal language model, or one with too few positions.
    """
    described = describe_model(config, "ForCausalLM", "an instruction-tuned model")
    longest = config.max_question_tokens + config.max_tokens
    check_positions(config, described, longest, "reward.max_question_tokens + reward.max_tokens")
    return build_on_meta(config, described, AutoModelForCausalLM)


def _without_costs(score: Score | Exception) -> Score | Exception:
    """Return the score of a question that was asked before."""
    return (
        {name: value if name == "reward" else 0.0 for name, value in score.items()}
        if isinstance(score, dict)
        else score
    )
