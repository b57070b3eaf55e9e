"""What an environment's reset adds to a prompt, and what of it costs a row its trajectory."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from infra.datasets import PromptRow
from infra.environments.dialogue import Dialogue
from infra.environments.slot import Failure, Reply
from infra.models.tiny import make_tokenizer
from rl_core.rollout.chat import ChatTemplate
from schemas.config.environment import ClassEnvironment
from schemas.errors import ChatTemplateError
from tests.unit.infra.test_environment_tokens import QWEN3

ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must\nalternate') }}{% endif %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PROMPT = PromptRow(np.zeros(1, dtype=np.int32), "begin", "", {}, "", [{"role": "user", "content": "begin"}])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = ALTERNATES, "models/alternating"
    return tokenizer


def failure_of(tokenizer: PreTrainedTokenizerFast, reply: Reply) -> str | None:
    dialogue = Dialogue(ClassEnvironment(kind="class", path="game:Game"), ChatTemplate(tokenizer), 20)
    return dialogue.begin(PROMPT, reply)[1]


def test_a_message_that_the_template_rejects_is_its_rows_failure(tokenizer: PreTrainedTokenizerFast) -> None:
    assert failure_of(tokenizer, Reply()) is None
    assert failure_of(tokenizer, Reply(observations=("go",), role="assistant")) is None
    assert failure_of(tokenizer, Reply(observations=("go",))) == (
        "reset: the chat template of models/alternating rejects a chat of the roles user, user: roles must alternate; "
        "let reset() return None, or end the row's prompt with another role"
    )


def test_the_role_of_a_class_decides_whether_reasoning_is_dropped() -> None:
    dropping = make_tokenizer()
    dropping.chat_template = QWEN3
    dialogue = Dialogue(ClassEnvironment(kind="class", path="game:Game"), ChatTemplate(dropping), 20)
    assert len(dialogue.environment_tokens("tool", ("go",), 0)) > 0
    with pytest.raises(ChatTemplateError, match="drops the reasoning of earlier turns"):
        dialogue.environment_tokens("user", ("go",), 0)


def test_other_failures_of_a_reset(tokenizer: PreTrainedTokenizerFast) -> None:
    assert failure_of(tokenizer, Reply(failure=Failure("raised", "no luck"))) == "reset: no luck"
    too_long = failure_of(tokenizer, Reply(observations=("go" * 20,), role="assistant"))
    assert too_long is not None
    assert "more than data.max_prompt_tokens = 20" in too_long
