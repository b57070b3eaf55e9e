"""Everything about a config that can be checked before a service or a worker is started."""

from infra.datasets import load_prompts
from infra.models import check_positions, load_tokenizer
from infra.tracking import TensorBoardSink
from rl_core.rewards import load_reward
from schemas.config.run import RunConfig
from schemas.errors import ConfigError


def check(config: RunConfig) -> None:
    """Load the tokenizer, the prompts and the reward function, and compare the config's limits with each other.

    Raises:
        UserError: What is wrong, where, and how to mend it.
    """
    tokenizer = load_tokenizer(config.model)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > config.packing.token_budget:
        raise ConfigError(
            f"packing.token_budget = {config.packing.token_budget} can't hold the longest row: "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; raise it to at least {longest}"
        )
    check_positions(config.model, longest)
    load_reward(config.reward)
    load_prompts(config.data.train_path, config.data, tokenizer)
    if config.data.eval_path is not None:
        load_prompts(config.data.eval_path, config.data, tokenizer)
    if config.runtime.tensorboard:
        TensorBoardSink.require()
