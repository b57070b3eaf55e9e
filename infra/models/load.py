"""Load models and tokenizers from Hugging Face folders, and check them before anything starts."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from infra.models.files import check_hub_weights, weights_digest
from infra.models.lora import add_adapter
from infra.models.weights import load_weights
from rl_core.model_folder import TOKENIZER_FILES, check_model_folder, load_config
from rl_core.scoring import RouterReplay
from schemas.config.model import ModelConfig
from schemas.errors import ModelError, WeightsError, first_line
from schemas.weights import Adapter, TensorSpec

logger = logging.getLogger(__name__)


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Have a model's layers keep their inputs only, and compute the rest again in the backward pass.

    transformers checkpoints layers in train mode. Only the layers themselves are put into it, so that their parts stay
    in eval mode: a router that adds noise in train mode, or a model that skips layers at random, still doesn't.

    Raises:
        ModelError: The model has no layers that can be checkpointed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # here, as few runs need it

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise ModelError(
            f"model.gradient_checkpointing: {type(model).__name__} doesn't support it; leave it out, and lower "
            "packing.token_budget if memory runs short"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, and check that it can format prompts and end responses.

    Raises:
        ModelError: The folder, its config or tokenizer files are missing or unreadable; the tokenizer has no chat
            template or end-of-sequence token, or more tokens than the model has embeddings.
    """
    tokenizer, num_tokens = _read_tokenizer(config), num_embeddings(config)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"model.path {config.path}: the tokenizer has no chat template; use an instruction-tuned model's, "
            "or write one to chat_template.jinja in that folder"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path {config.path}: the tokenizer has no eos_token, so responses could never end; set it "
            "in tokenizer_config.json"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_tokens:
        raise ModelError(
            f"model.path {config.path}: the tokenizer's largest token id is {largest}, but the model has "
            f"embeddings for {num_tokens} tokens (0 to {num_tokens - 1}); use the tokenizer of this model"
        )
    return tokenizer


def check_same_tokens(teacher: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model can score the tokens of a tokenizer; it may have embeddings for more.

    Raises:
        ModelError: Its folder or its tokenizer can't be read, or has other tokens.
    """
    own, given = _read_tokenizer(teacher).get_vocab(), tokenizer.get_vocab()
    if own == given and num_embeddings(teacher) > max(given.values()):
        return
    differ = sorted(token for token in own.keys() | given.keys() if own.get(token) != given.get(token))
    example = f", such as {differ[0]!r}" if differ else ""
    raise ModelError(
        f"model.path {teacher.path}: its tokenizer is not that of the policy ({len(own)} and {len(given)} tokens, of "
        f"which {len(differ)} differ{example}), so that it can't score the policy's samples; choose a model with the "
        "same tokenizer"
    )


def _read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    check_model_folder("model.path", config.path, TOKENIZER_FILES)
    load_config(config.path)  # says what is wrong with it; what loads a tokenizer reads it too
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.path)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"model.path {config.path}: the tokenizer can't be loaded: {first_line(error)}") from error
    return tokenizer


def load_model(config: ModelConfig) -> PreTrainedModel:
    """Load the causal language model in float32 on the CPU, in eval mode and without dropout.

    Dropout is removed rather than switched off: checkpointed layers are in train mode.

    Raises:
        ModelError: The folder, its config or weights are missing or unreadable, or don't cover the model.
    """
    model = empty_model(config)
    load_weights(model, config.path, torch.device("cpu"))
    return model


def check_weight_files(config: ModelConfig, *, is_here: bool = True) -> None:
    """Check that a folder's weights cover the model, by the files' headers; for a model on the hub, that they exist.

    Only of weights that are tied and stored twice, the values are read: they must be the same. Warns of weights that
    are no part of the model.

    Args:
        config: The model.
        is_here: Whether this machine loads it: else weights that are not in its cache may be in that of one that does.

    Raises:
        ModelError: See `load_model`.
    """
    if Path(config.path).is_dir():
        model = empty_model(config)
        warn_of_unused(model, config.path, load_weights(model, config.path, torch.device("meta")))
    else:
        check_hub_weights(config.path, is_here=is_here)


def warn_of_unused(model: PreTrainedModel, path: str, unused: Sequence[str]) -> None:
    """Say which stored weights are no part of the model that is trained: an export won't have them either."""
    if unused:
        logger.warning(
            "model.path %s: %d of its tensors are no part of %s, which is what is trained and exported, e.g. %s",
            path,
            len(unused),
            type(model).__name__,
            unused[0],
        )


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """Build the model that `load_model` loads, with parameters on the meta device; `load_weights` fills it.

    Its buffers, which are computed and not loaded, exist on the CPU.

    Raises:
        ModelError: The folder or its config is missing or unreadable, or the weights are quantized.
    """
    disable_progress_bar()  # its bars would interrupt our own progress lines
    check_model_folder("model.path", config.path)
    try:
        with _parameters_on_meta():
            model = build_model(Path(config.path))
    except ModelError:
        raise
    except Exception as error:  # json and transformers raise unrelated types for bad configs
        raise ModelError(f"model.path {config.path}: the model can't be loaded: {first_line(error)}") from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"model.path {config.path}: its weights are quantized and can't be trained; use the original")
    return model


def empty_policy(config: ModelConfig) -> PreTrainedModel:
    """Build the model to train, in eval mode, adapters included, on the meta device; `load_weights` fills it.

    Raises:
        ModelError: See `empty_model`; or the model can't checkpoint.
        ConfigError: See `infra.models.lora.add_adapter`.
    """
    model = empty_model(config)
    if config.lora is not None:
        add_adapter(model, config.lora)
        model.eval()  # peft's layers start in train mode
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as a module has it, before it has values."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def build_model(folder: Path) -> PreTrainedModel:
    """Build the model that a folder's config describes, in float32, in eval mode and without dropout.

    Its weights are random, to be overwritten. Its config and generation config are the folder's.
    """
    config = load_config(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = _generation_config(str(folder)) or model.generation_config
    _remove_dropout(model)
    constants_to_buffers(model)
    return model.eval()


def experts_dtype(config: ModelConfig) -> str:
    """Return the dtype of columns of the experts of a model's tokens, without memory for its weights.

    Raises:
        ModelError: The model's experts can't be recorded and replayed, or it has none.
    """
    return RouterReplay(build_meta_model(config)).column_dtype


def build_meta_model(config: ModelConfig) -> PreTrainedModel:
    """Build the model in float32 on the meta device: its parameters have shapes but no memory.

    Raises:
        ModelError: The folder's config does not describe a causal language model.
    """
    try:
        with torch.device("meta"):
            return build_model(Path(config.path))
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"model.path {config.path}: not a causal language model: {first_line(error)}") from error


def check_weights(
    model: PreTrainedModel, specs: Sequence[TensorSpec], version: int, *, is_complete: bool = True
) -> None:
    """Check that tensors are a complete set of the model's weights; for tied weights, one name is enough.

    Args:
        model: The model, on any device, including `meta`.
        specs: The tensors, by state-dict name.
        version: Their policy version.
        is_complete: Whether all weights must be among them.

    Raises:
        WeightsError: A name or shape is not the model's, or a weight is missing.
    """
    own = model.state_dict(keep_vars=True)
    given = {id(own[spec.name]) for spec in specs if spec.name in own}
    unknown = [spec.name for spec in specs if spec.name not in own]
    missing = [name for name, weight in model.named_parameters() if is_complete and id(weight) not in given]
    misshapen = [spec.name for spec in specs if spec.name in own and own[spec.name].shape != spec.shape]
    if unknown or missing or misshapen:
        raise WeightsError(
            f"weights of version {version} don't fit the model: unknown {unknown[:3]}, missing "
            f"{missing[:3]}, of another shape {misshapen[:3]}; load weights of the same architecture"
        )


def describe_adapter(config: ModelConfig) -> Adapter | None:
    """Return what a checkpoint of this model's adapter records about its base; None if all weights are trained."""
    if config.lora is None:
        return None
    base = str(Path(config.path).resolve()) if Path(config.path).is_dir() else config.path
    return Adapter(base_model=base, base_digest=weights_digest(base), lora=config.lora)


def stop_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's and the generation config's, ascending.

    Raises:
        ModelError: The generation config can't be read, or a token isn't the model's.
    """
    generation = _generation_config(config.path)
    if generation is None and not Path(config.path).is_dir() and _cached(config.path) is None:
        logger.warning(
            "model.path %s: generation_config.json is not in the cache, and the hub can't be reached: only the tokens "
            "of config.json end responses; if the model has it, download it where there is a network: hf download %s",
            config.path,
            config.path,
        )
    source = generation or load_config(config.path).get_text_config()
    configured = getattr(source, "eos_token_id", None)
    more = configured if isinstance(configured, list) else [] if configured is None else [configured]
    num_tokens = num_embeddings(config)
    for token in more:
        if type(token) is not int or not 0 <= token < num_tokens:
            file = "config.json" if generation is None else "generation_config.json"
            raise ModelError(
                f"{config.path}/{file}: eos_token_id has {token!r:.40}, expected token ids of the model, 0 to "
                f"{num_tokens - 1}; correct or remove it, else responses would not end there"
            )
    return tuple(sorted({tokenizer.eos_token_id, *more}))


def num_embeddings(config: ModelConfig) -> int:
    """Return the number of tokens that the model has embeddings for.

    Raises:
        ModelError: The config can't be read, or doesn't have it.
    """
    vocab_size = getattr(load_config(config.path).get_text_config(), "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ModelError(
            f"model.path {config.path}: vocab_size in config.json is {vocab_size!r}, expected a number of tokens; take "
            "config.json from the model's original folder"
        )
    return vocab_size


def max_positions(config: ModelConfig) -> int:
    """Return the most tokens, prompt plus response, that a row may have under the model; without positions, any."""
    text = load_config(config.path).get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or sys.maxsize)


def _generation_config(path: str) -> GenerationConfig | None:
    """Return the model's own generation config; None if it has none, or the hub can't be asked for it."""
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # what transformers raises for bad contents
        file = Path(path, "generation_config.json")
        if not (file.exists() or isinstance(_cached(path), str)):
            return None
        raise ModelError(
            f"{file} can't be read: {first_line(error)}; correct it, or take it from the model's original folder"
        ) from error


def _cached(name: str) -> object:
    """Return what the cache knows of a hub model's generation config: its path, that it has none, or nothing: None."""
    return None if Path(name).is_dir() else try_to_load_from_cache(name, "generation_config.json")


def _remove_dropout(model: PreTrainedModel) -> None:
    """Set every probability of dropout to 0, in modules and in the configs that some layers read it from."""
    configs = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        _set_dropout_to_zero(module)
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
            _set_dropout_to_zero(part)


def _set_dropout_to_zero(owner: nn.Module | PretrainedConfig) -> None:
    for name, value in list(vars(owner).items()):
        if "drop" in name and isinstance(value, float):  # attention_dropout, attn_pdrop, layerdrop
            setattr(owner, name, 0.0)


def constants_to_buffers(model: PreTrainedModel) -> None:
    """Make buffers of the parameters that a model freezes itself, e.g. its routers' biases.

    As parameters they would be gathered, and so rounded, in the compute dtype; buffers of the same name keep their own.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())


@torch.no_grad()
def cast_model(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model's weights in place, as transformers does when it loads them in that dtype: some stay in float32.

    These are those that its class declares, and those that its code makes in float32 in a model of any dtype.
    """
    kept = _float32_names(model, dtype)
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(model.config, dtype=dtype).state_dict()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not (kept and kept.search(name)):
            tensor.data = tensor.data.to(loaded[name].dtype)


def _float32_names(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return what the names of tensors contain that stay in float32, which a model's class declares."""
    declared: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        declared |= set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        declared |= set(model._keep_in_fp32_modules or ())
    return re.compile("|".join(re.escape(part).replace(r"\*", ".*") for part in sorted(declared))) if declared else None
