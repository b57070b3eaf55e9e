"""The check that the longest prompt and response fit the model and a micro-batch."""

from infra.datasets.prompts import PromptDataset
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

SHORTEN = 'lower that, or data.max_prompt_tokens with data.overlong = "drop"'


def check_prompts(
    config: RunConfig, prompts: PromptDataset, held_out: PromptDataset | None, num_positions: int
) -> None:
    """Check that the longest prompt plus the longest response fit the model and, in training, a micro-batch.

    Args:
        config: The run's configuration.
        prompts: The training prompts.
        held_out: The evaluation prompts; evaluation packs no micro-batches.
        num_positions: The most tokens of a sequence that the model accepts.

    Raises:
        ConfigError: They don't fit.
    """
    if held_out is not None:
        limit = "rollout" if config.eval.max_response_tokens is None else "eval"
        response = config.eval.max_response_tokens or config.rollout.max_response_tokens
        _check_positions(config, held_out.max_prompt_tokens, response, f"{limit}.max_response_tokens", num_positions)
    prompt, response = prompts.max_prompt_tokens, config.rollout.max_response_tokens
    name = "rollout.max_response_tokens"
    _check_positions(config, prompt, response, name, num_positions)
    if prompt + response > config.packing.token_budget:
        raise ConfigError(
            f"{_sizes(prompt, response, name)} more than packing.token_budget = {config.packing.token_budget}; "
            f"raise it to at least {prompt + response}, or {SHORTEN}"
        )


def _check_positions(config: RunConfig, prompt: int, response: int, name: str, num_positions: int) -> None:
    if prompt + response > num_positions:
        raise ConfigError(
            f"{_sizes(prompt, response, name)} more than the {num_positions} positions of the model "
            f"{config.model.path}; {SHORTEN}"
        )


def _sizes(prompt: int, response: int, name: str) -> str:
    return f"the longest prompt has {prompt} tokens and {name} is {response}, together"
