"""`sluice init`: a commented config of one screen for a model and a file of prompts."""

import json
import re
from pathlib import Path

from rich.console import Console

from infra.datasets import PromptDataset
from infra.datasets.load import load_train_prompts
from infra.models.load import load_tokenizer, max_positions
from rl_core.rewards.numeric import MARK, expected_quantity
from schemas.config.data import DataConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

NO_LIMIT = 2**31 - 1  # tokens of a prompt; its length is measured here
RESPONSE_TOKENS, TOKEN_BUDGET, NUM_PROMPTS = 1024, 8192, 16
MIN_RESPONSE_TOKENS = 64  # less is no room for an answer: the longest prompts are dropped instead, if they are few
MAX_DROPPED = 0.1  # fraction of the prompts
REWARDS = {
    "numeric": "1 if the response's final number is the answer's, else 0",
    "exact": "1 if the response is the answer, else 0",
    "math": "1 if the response's final formula equals the answer, else 0",
}
_WORD = re.compile(r"[^\W\d_]{2}")
TEMPLATE = """\
# Check it with `sluice plan {file}`, start it with `sluice train {file}` [KEY=VALUE]...
name = {name:<23} # run ids begin with it
steps = 200                    # a run can be extended later

[model]
path = {model}
# lora = {{ rank = 16 }}         # train adapters only

[data]
train_path = {data}
max_prompt_tokens = {prompt_tokens:<10d} # of the longest prompt; a longer one is {longer}
# eval_path = "heldout.jsonl"  # held-out prompts; set eval.every_steps, too

[reward]
kind = {reward}

[rollout]
kind = "transformers"          # "vllm" generates faster on GPUs
num_prompts = {num_prompts:<16d} # of a step, drawn from the data
samples_per_prompt = 8         # a group: advantages compare its rewards
max_response_tokens = {response_tokens}
temperature = 1.0

[packing]
token_budget = {token_budget:<15d} # of a micro-batch: lower it if memory is short

[optim]
lr = 1e-6                      # with lora, 10 times as much

[kl]
coef = 0.0                     # above 0: keeps the policy close to the model at the start

[checkpoint]
every_steps = 5

[runtime]
num_policy_ranks = 1           # GPUs that train
placement = "separate"         # "colocated": rollout and training take turns on one GPU
"""


def write_config(console: Console, model: str, data: str, reward: str | None, out: Path) -> None:
    """Write a config whose sizes fit a model and its prompts, and print what to do with it.

    Args:
        console: The console to print on.
        model: A Hugging Face model folder.
        data: Prompts, as `data.train_path`.
        reward: One of `REWARDS`, or a function as `module:function`; None: by the answers, `numeric` or `exact`.
        out: The file, which must not exist.

    Raises:
        UserError: The file exists, or the model, the prompts or the reward can't be used.
    """
    config = ModelConfig(path=model)
    prompts = load_train_prompts(DataConfig(train_path=data, max_prompt_tokens=NO_LIMIT), load_tokenizer(config))
    limit = _prompt_limit(config, data, prompts)
    text = _fill(out, config, data, prompts, limit, _reward_line(reward or _default_reward(prompts)))
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists; remove it, or give another file with --out") from None
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror}") from None
    if dropped := sum(length > limit for length in _lengths(prompts)):
        told = f"{dropped} of {len(prompts)} prompts have more than {limit} tokens, up to {prompts.max_prompt_tokens}"
        console.print(f"{told}: they are dropped (data.overlong)", markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote {out}; next: sluice plan {out}", markup=False, highlight=False, soft_wrap=True)


def _lengths(prompts: PromptDataset) -> list[int]:
    return [len(prompts[number].prompt_ids) for number in range(len(prompts))]


def _prompt_limit(config: ModelConfig, data: str, prompts: PromptDataset) -> int:
    """Return `data.max_prompt_tokens`: of the longest prompt, or without the few that leave no room for a response."""
    positions, lengths = max_positions(config), _lengths(prompts)
    if max(lengths) + MIN_RESPONSE_TOKENS <= positions:
        return max(lengths)
    kept = [length for length in lengths if length + min(RESPONSE_TOKENS, positions // 2) <= positions]
    if len(kept) >= (1 - MAX_DROPPED) * len(lengths):
        return max(kept)
    if max(lengths) < positions:
        return max(lengths)
    raise ConfigError(
        f"the longest prompt of {data} has {max(lengths)} tokens, and the model {config.path} has {positions} "
        f"positions, which leaves none for a response; {len(lengths) - len(kept)} of {len(lengths)} prompts leave few: "
        "shorten the prompts"
    )


def _fill(out: Path, config: ModelConfig, data: str, prompts: PromptDataset, prompt_tokens: int, reward: str) -> str:
    response_tokens = min(RESPONSE_TOKENS, max_positions(config) - prompt_tokens)
    drops = prompt_tokens < prompts.max_prompt_tokens
    name = re.sub(r"[^A-Za-z0-9._-]", "-", out.stem)
    return TEMPLATE.format(
        file=out,
        name=_quoted(name if name[:1].isalnum() else f"run{name}"),
        model=_quoted(config.path),
        data=_quoted(data),
        prompt_tokens=prompt_tokens,
        longer='dropped\noverlong = "drop"' if drops else "refused",
        reward=reward,
        num_prompts=min(NUM_PROMPTS, sum(length <= prompt_tokens for length in _lengths(prompts))),
        response_tokens=response_tokens,
        token_budget=max(TOKEN_BUDGET, prompt_tokens + response_tokens),
    )


def _reward_line(reward: str) -> str:
    if ":" in reward:
        return f'"function"\npath = {_quoted(reward):<23} # called with (prompt, completion, answer, info)'
    if reward not in REWARDS:
        raise ConfigError(
            f"--reward {reward!r}: expected {', '.join(REWARDS)}, or a function as module:function; other kinds are "
            "set in the file"
        )
    return f"{_quoted(reward):<23} # {REWARDS[reward]}"


def _default_reward(prompts: PromptDataset) -> str:
    answers = {prompts[number].answer for number in range(len(prompts))}
    return "numeric" if all(map(_is_number, answers)) else "exact"


def _is_number(answer: str) -> bool:
    """Return whether an answer is what `numeric` compares, and has no words."""
    if _WORD.search(answer.rpartition(MARK)[2]):
        return False
    try:
        expected_quantity(answer)
    except ValueError:
        return False
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
