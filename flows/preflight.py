"""Checks of a config before any service or worker is started."""

import logging
from contextlib import suppress
from typing import Literal

import fsspec
import torch
from transformers import PreTrainedTokenizerBase

from flows.answers import check_answers
from flows.plan.footprint import check_capacity
from infra.checkpoints.state import model_tensors
from infra.checkpoints.store import open_checkpoints
from infra.datasets import PromptDataset, PromptRow, load_run_prompts
from infra.datasets.environments import schemas_of_tools
from infra.datasets.prompts import check_prompts
from infra.datasets.sft import SftDataset, check_rows
from infra.datasets.teacher_prompts import TeacherPrompts
from infra.engines.families import check_family, check_scoring
from infra.engines.open import find_engine
from infra.engines.sizes import cache_bytes_per_sequence, check_tensor_parallel
from infra.engines.vllm.start import check_adapters
from infra.environments.open import check_environments, check_tools
from infra.history.reuse import check_source
from infra.models.load import (
    build_meta_model,
    check_same_tokens,
    check_weight_files,
    experts_dtype,
    load_tokenizer,
    max_positions,
    num_embeddings,
    stop_token_ids,
)
from infra.models.lora import add_adapter, require_peft
from infra.monitors import require_monitors
from infra.ray.tracing import require_tracing
from infra.rewards.open import check_reward
from infra.storage.runs import RunDirectory, require_writable, resumed_config
from infra.stores.open import check_name
from infra.workers.inputs import check_files, open_rows, with_date
from infra.workers.placement import check_resources
from rl_core.model_folder import load_config
from rl_core.rollout.chat import ChatTemplate
from schemas.config.rollout import ProgramRollout, VllmRollout
from schemas.config.run import RunConfig
from schemas.errors import ChatTemplateError, CheckpointError, ConfigError, ModelError
from schemas.metric_catalog import metric_spec
from schemas.placement import Device

logger = logging.getLogger(__name__)


def check(
    config: RunConfig, directory: RunDirectory | None = None, *, runs_here: bool = True, trains: bool = True
) -> PromptDataset:
    """Load the tokenizer, the prompts and the reward function, and check every row and the URLs.

    Args:
        config: The run.
        directory: Its directory, if it exists: the rows of supervised fine-tuning that it keeps aren't encoded again.
        runs_here: Whether it is to run in this environment, whose vLLM is then checked too.
        trains: Whether it trains; an evaluation's training prompts needn't fit.

    Raises:
        UserError: A part of the config is not usable; the message says which, where, and how to fix it.
    """
    check_urls(config)
    for limit in config.approval.when:
        if metric_spec(limit.metric).stage == "evaluation":
            raise ConfigError(
                f"approval.when: {limit}: {limit.metric} is a metric of evaluations, and no step has it; take one of "
                "steps, such as reward"
            )
    if config.approval.queries is not None:
        from infra.history.sql import load_queries  # here, since few runs need DuckDB

        load_queries(config.approval.queries)
    tokenizer = load_tokenizer(config.model)
    if config.sft:
        prompts: PromptDataset = _check_sft(config, directory)
    else:
        prompts = _check_rollout(config, tokenizer, runs_here=runs_here, trains=trains)
    if config.model.lora is not None:
        require_peft()
    require_monitors(config)
    require_tracing(config)
    return prompts


def _check_sft(config: RunConfig, directory: RunDirectory | None) -> SftDataset:
    """Check what only supervised fine-tuning has, and return the training rows."""
    config = with_date(config)  # as the run will have it: what is encoded here is what it keeps
    rows = open_rows(directory, config, "train")
    check_family(config)
    held_out = open_rows(directory, config, "held-out") if config.data.eval_path else None
    check_rows(config, rows, held_out, max_positions(config.model))
    return rows


def _check_rollout(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, runs_here: bool, trains: bool
) -> PromptDataset:
    """Check what only a run with a rollout has, and return the training prompts."""
    check_stop_tokens(config)
    stop_token_ids(config.model, tokenizer)
    if isinstance(config.rollout, VllmRollout | ProgramRollout):
        check_tensor_parallel(config.model, config.rollout)
        if isinstance(config.rollout, VllmRollout):
            check_adapters(config.model)
        if runs_here:
            check_engine(config, config.rollout)
    check_reward(config.reward)
    check_tools(config)
    prompts, held_out = load_run_prompts(config, tokenizer)
    if trains and len(prompts) < config.rollout.num_prompts:
        logger.warning(
            "data has %d training prompts, fewer than rollout.num_prompts = %d: a step repeats some of them, each as a "
            "group of its own; lower rollout.num_prompts, or give more data",
            len(prompts),
            config.rollout.num_prompts,
        )
    _warn_of_missing_prompt(config, tokenizer, prompts[0])
    check_environments(config, tokenizer, prompts)
    check_family(config)
    check_prompts(config, prompts if trains else None, held_out, max_positions(config.model))
    check_answers(config, prompts, held_out)
    check_reuse(config, tokenizer)
    check_teachers(config, tokenizer, prompts)
    if config.rollout.router_replay:
        experts_dtype(config.model)
    return prompts


def check_run(config: RunConfig, directory: RunDirectory | None = None) -> None:
    """Check all of a run that is to start or, with its directory, to go on: `check`, what it holds, and its room.

    Raises:
        UserError: A part of it is not usable, or is not what the run was given before.
    """
    if directory is not None:
        check_name(directory)
        check_files(directory, config)
    check_capacity(config, check(config, directory))
    if directory is not None:
        check_checkpoint(directory, config)
    teachers = config.distillation.teachers.values() if config.distillation else ()
    models = [config.model, *(each.model for each in teachers if each.model is not None)]
    for model in {model.path: model for model in models}.values():
        check_weight_files(model, is_here=config.services.ray_address is None)


def check_start(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """Check a run that is to start or, if its directory exists, to go on; return the config that it does so with.

    Raises:
        UserError: See `check_run`; or the run exists, and is another one.
    """
    if not directory.exists:
        check_run(config)
        return config
    config = resumed_config(directory, config)
    check_run(config, directory)
    return config


def _warn_of_missing_prompt(config: RunConfig, tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> None:
    """Warn if the chat template doesn't end prompts with the beginning of the model's turn."""
    tools = () if row.environment is None else schemas_of_tools(config.environments[row.environment])
    chat = ChatTemplate(tokenizer, config.data.chat_template_kwargs, tools)
    with suppress(ChatTemplateError):  # it takes no turn of the model after these
        if missing := chat.find_missing_prompt(row.messages):
            logger.warning(
                "%s writes no generation prompt: prompts lack %r, with which the model's turns begin, so that the "
                "model would have to write it itself; have the template write it if add_generation_prompt is true",
                chat.name,
                missing,
            )


def check_checkpoint(directory: RunDirectory, config: RunConfig) -> None:
    """Check that a run's newest checkpoint fits the config's model, by tensor names, shapes and dtypes.

    Damaged ones, as far as their files' sizes and headers tell, are skipped: the policy will do so, with a warning.

    Raises:
        ModelError: It doesn't fit: the model folder no longer holds the model that the run started with.
    """
    checkpoints = open_checkpoints(directory, directory.config().checkpoint)  # not moved to another place yet
    readable = checkpoints.undamaged(checkpoints.complete_versions(), checkpoints.tensor_names, logging.INFO)
    if (newest := next(readable, None)) is None:
        return
    model = build_meta_model(config.model)
    if config.model.lora is not None:
        add_adapter(model, config.model.lora)
    try:
        checkpoints.check_tensors(newest[0], model_tensors(model))
    except CheckpointError as error:
        raise ModelError(
            f"model.path {config.model.path} is not the model that run {directory.run_id} trains: {error}; "
            "restore the folder that the run started with"
        ) from None


def check_reuse(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a run whose groups are trained on again has the same tokens, and rows of the same kind.

    Raises:
        RunError: There is no such run, a step is not kept, or its rows don't fit.
        ModelError: Its tokenizer is another one, or its model's folder is gone.
    """
    source = check_source(config, max_positions(config.model))
    if source is None or (path := source.config().model.path) == config.model.path:
        return
    other = source.config().model
    if load_tokenizer(other).get_vocab() != tokenizer.get_vocab() or num_embeddings(other) != num_embeddings(
        config.model
    ):
        raise ModelError(
            f"data.reuse.run: run {source.run_id} has the tokens of {path}, which are not those of model.path "
            f"{config.model.path}; choose a run with the same tokenizer and vocabulary size"
        )


def check_teachers(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> None:
    """Check that each row has a teacher, which has the policy's tokens, and that the longest row fits it.

    Raises:
        ModelError: A teacher can't be read or scored with, or has another tokenizer; the message names it.
        DataError: A row has no teacher, or its teacher's prompt can't be made.
        ConfigError: The longest row doesn't fit a teacher, or a micro-batch.
    """
    if config.distillation is None:
        return
    longest, response = TeacherPrompts(config, tokenizer).longest(prompts), config.rollout.max_response_tokens
    for name, teacher in config.distillation.teachers.items():
        model, place = teacher.model or config.model, f"distillation.teachers.{name}"
        try:
            check_same_tokens(model, tokenizer)
            check_scoring(config, model, longest.get(name, 0) + response)
        except ModelError as error:
            raise ModelError(str(error).replace("model.path", f"{place}.path")) from None
        num_tokens = min(num_embeddings(model), num_embeddings(config.model))
        if config.distillation.reads_top and config.distillation.top_k > num_tokens:
            raise ConfigError(
                f"distillation.top_k is {config.distillation.top_k}, more than the {num_tokens} tokens of the policy "
                f"and {place}; lower it"
            )
        if name not in longest:
            logger.warning("%s teaches no row: no prompt is of a data source that it names", place)
        limits = {"packing.token_budget": config.packing.token_budget, f"{place}'s positions": max_positions(model)}
        limit = min(limits, key=lambda each: limits[each])
        if (tokens := longest.get(name, 0) + response) > limits[limit]:
            raise ConfigError(
                f"{place}: its longest prompt and rollout.max_response_tokens are {tokens} tokens, more than {limit}, "
                f"{limits[limit]}; raise it, or lower rollout.max_response_tokens or {place}.max_prompt_tokens"
            )


def check_urls(config: RunConfig) -> None:
    """Check that this environment can write the folder of runs, and knows the file systems of columns and checkpoints.

    Raises:
        ConfigError: fsspec doesn't know a URL's protocol, or lacks the package for it; or nothing can be written to
            the folder of runs.
    """
    require_writable(config.runtime.runs_dir)
    for key, url in {"checkpoint.url": config.checkpoint.url, "store.url": getattr(config.store, "url", None)}.items():
        try:
            if url:
                fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{key} = {url!r} can't be opened: {error}; for s3:// install the extra: pip install "
                f"'sluice-rl[s3]'; leave {key} out to use the run directory (on the command line, {key}= clears it)"
            ) from None


def check_stop_tokens(config: RunConfig) -> None:
    """Check that the config's stop tokens are in the model's vocabulary.

    Raises:
        ConfigError: One of them isn't.
    """
    vocab_size = load_config(config.model.path).get_text_config().vocab_size
    unknown = [token for token in config.rollout.stop_token_ids if token >= vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids has {unknown[0]}, but the model {config.model.path} has tokens 0 to "
            f"{vocab_size - 1}; remove it"
        )


def check_cluster(config: RunConfig) -> Device:
    """Return what the workers of a run compute on, after a Ray cluster was connected to; check the engine for that.

    Raises:
        ConfigError: The cluster has too few cores or GPUs, or the engine computes on another device.
    """
    device = check_resources(config)
    if isinstance(config.rollout, VllmRollout | ProgramRollout):
        check_engine(config, config.rollout, device)
    return device


def check_engine(
    config: RunConfig, rollout: VllmRollout | ProgramRollout, decided: Literal["auto"] | Device = "auto"
) -> None:
    """Check that the engine is installed for the run's device and that, on a CPU, a sequence fits its KV cache.

    Args:
        config: The run's configuration.
        rollout: Its rollout.
        decided: What the nodes of a Ray cluster have, as far as it is known.

    Raises:
        ConfigError: The engine is missing or computes on another device, or a sequence doesn't fit.
    """
    found = find_engine(rollout)
    device, on_cpu, before = config.runtime.device, found.device == "cpu", ""
    chosen = f"runtime.device = {device!r}"
    if device == "auto" and decided != "auto":
        device, chosen = decided, f"the Ray cluster has {'no GPU' if decided == 'cpu' else 'GPUs'}"
        before = "wait until its GPU nodes have joined, or " if decided == "cpu" else ""
    elif device == "auto" and config.services.ray_address is None:
        device, has = ("cuda", "a GPU") if torch.cuda.is_available() else ("cpu", "no GPU")
        chosen = f"this machine, on which the run is alone, has {has}"
        before = "" if on_cpu else "set services.ray_address to a cluster with GPUs, or "
    if device not in ("auto", found.device) and rollout.kind == "program":
        raise ConfigError(
            f"{chosen}, but {found.engine} of rollout.program {rollout.program!r} computes on "
            f"{found.device}; set one of them to the other's"
        )
    if device not in ("auto", found.device):
        raise ConfigError(
            f"{chosen}, but the installed vLLM is built for "
            f"{'CPUs' if on_cpu else 'CUDA'}; {before}install the other build: sluice "
            f"engine install vllm --{'cuda' if on_cpu else 'cpu'}"
        )
    dtype = rollout.dtype_on("cpu" if on_cpu else "cuda")
    needed = cache_bytes_per_sequence(config, getattr(torch, dtype))
    if on_cpu and needed > rollout.cache_bytes:
        raise ConfigError(
            f"rollout.cache_bytes = {rollout.cache_bytes} can't hold the keys and values of one longest sequence, "
            f"{needed} bytes in {dtype}; raise it, to a multiple of that for many samples at a time, or lower "
            "data.max_prompt_tokens or rollout.max_response_tokens"
        )
