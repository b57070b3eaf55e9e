"""Everything about a config that can be checked before a service or a worker is started."""

import fsspec

from infra.datasets import PromptDataset, load_prompts
from infra.lora import require_peft
from infra.models import load_tokenizer, max_positions
from infra.tracking import TensorBoardSink
from rl_core.rewards import load_reward
from schemas.config.run import RunConfig
from schemas.config.store import RayStore, StoreConfig
from schemas.errors import ConfigError


def check(config: RunConfig) -> None:
    """Load the tokenizer, the prompts and the reward function, and see that every row and the store will do.

    Raises:
        UserError: What is wrong, where, and how to mend it.
    """
    check_store(config.store)
    tokenizer = load_tokenizer(config.model)
    load_reward(config.reward)
    for path in filter(None, (config.data.train_path, config.data.eval_path)):
        check_room(config, load_prompts(path, config.data, tokenizer), max_positions(config.model))
    if config.model.lora is not None:
        require_peft()
    if config.runtime.tensorboard:
        TensorBoardSink.require()


def check_store(config: StoreConfig) -> None:
    """See that the store's file system is one that this environment can reach.

    Raises:
        ConfigError: fsspec doesn't know the URL, or lacks the package for it.
    """
    if isinstance(config, RayStore) or config.url is None:
        return
    try:
        fsspec.core.url_to_fs(config.url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"store.url = {config.url!r} can't be opened: {error}; for s3:// install the extra: "
            "pip install 'sluice[s3]'; leave store.url out to keep columns in the run directory"
        ) from None


def check_room(config: RunConfig, prompts: PromptDataset, num_positions: int) -> None:
    """See that the longest prompt and the longest response fit the model and a micro-batch.

    Raises:
        ConfigError: They don't.
    """
    prompt, response = prompts.max_prompt_tokens, config.rollout.max_response_tokens
    sizes = f"the longest prompt has {prompt} tokens and rollout.max_response_tokens is {response}, together"
    shorter = 'lower that, or data.max_prompt_tokens with data.overlong = "drop"'
    if prompt + response > num_positions:
        raise ConfigError(
            f"{sizes} more than the {num_positions} positions of the model {config.model.path}; {shorter}"
        )
    if prompt + response > config.packing.token_budget:
        raise ConfigError(
            f"{sizes} more than packing.token_budget = {config.packing.token_budget}; raise it to at least "
            f"{prompt + response}, or {shorter}"
        )
