"""Low-rank adapters on a model's linear layers (arXiv:2106.09685), by peft: the adapters train, the base is frozen.

The model keeps its class and its attention, so that packed scoring and the engines see an ordinary causal language
model. An adapted layer computes W x + (alpha / rank) B A x; its own weight is then named `<layer>.base_layer.weight`,
the adapter's weights `<layer>.lora_A.default.weight` and `<layer>.lora_B.default.weight`.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from schemas.config.model import LoraConfig
from schemas.errors import ConfigError, describe

_ADAPTER = "default"


def add_adapter(model: PreTrainedModel, config: LoraConfig, seed: int = 0) -> None:
    """Add adapters to a model in place; from then on only they train.

    A is random, B is zero: the model computes what it did before. On the meta device they have no values yet.

    Args:
        model: A causal language model without adapters.
        config: Rank, scale and layers.
        seed: The seed of A; the global random state is left unchanged.

    Raises:
        ConfigError: peft is not installed or refuses a layer; or `target_modules` names no linear layer, or the head.
    """
    require_peft()
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    _inject(model, config, _target_layers(model, config.target_modules), on_meta=on_meta)
    if not on_meta:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in new_adapter_weights(model, seed):
                parameters[name].copy_(value)


def _inject(model: PreTrainedModel, config: LoraConfig, names: Sequence[str], *, on_meta: bool) -> None:
    """Put peft's layers in the place of the named ones, and of no others.

    They are given by the names of their weights: names as `target_modules` would mean other layers in some mixtures of
    experts, as peft takes those of dense and shared layers for those of the experts.
    """
    import peft

    adapter = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=[], bias="none")
    weights = {f"{name}.lora_A.weight": torch.empty(0) for name in names}
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the list of target modules is another one
            peft.inject_adapter_in_model(
                adapter, model, adapter_name=_ADAPTER, low_cpu_mem_usage=on_meta, state_dict=weights
            )
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.lora: peft can't adapt a layer of {type(model).__name__}: {describe(error)}; name others in "
            f"model.lora.target_modules, of {', '.join(part for part in last_parts(names) if part not in str(error))}"
        ) from error
    if set(adapted_layers(model)) != set(names):
        raise ConfigError(
            f"model.lora: peft adapts other layers of {type(model).__name__} than those asked for; leave model.lora out"
        )


def new_adapter_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and initial values of the adapters' weights, whole, float32, on the CPU.

    Every rank of a sharded model draws all of them, so that they don't depend on the number of ranks.

    Args:
        model: The model with adapters, on any device, including `meta`.
        seed: The seed of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            value = torch.zeros(parameter.shape)
            if ".lora_A." in name:  # peft's default
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            yield name, value


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's weight."""
    return ".lora_" in name


def without_adapter(name: str) -> str:
    """Return the name that a parameter of an adapted model has in the base model."""
    return name.replace(".base_layer.", ".")


def require_peft() -> None:
    """Check that peft, which makes the adapters, is installed.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ConfigError("model.lora needs peft, which is not installed: pip install 'sluice-rl[lora]'") from None


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers with adapters."""
    return list(_layers(model))


def has_adapter(model: nn.Module) -> bool:
    """Return whether the model has adapters."""
    return bool(_layers(model))


def published_weights(model: nn.Module, *, as_adapters: bool) -> dict[str, Tensor]:
    """Return the weights that engines are sent; the model is left unchanged.

    Args:
        model: The policy.
        as_adapters: Whether engines have the adapters too; else, see `merged_weights`.

    Returns:
        Weights by the names of the engines' model, tied ones once, in the parameters' dtypes and placements. Those that
        are not merged are the live ones, not copies.
    """
    if not as_adapters:
        return merged_weights(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def save_adapters(adapters: Mapping[str, Tensor], config: LoraConfig, folder: Path) -> None:
    """Write adapters in peft's format.

    Args:
        adapters: All adapters' weights by the policy's names, on the CPU.
        config: Their rank and scale.
        folder: A folder that is there.

    Raises:
        OSError: Its file system has no space.
    """
    targets = last_parts({name.partition(".lora_")[0] for name in adapters})
    settings = {"peft_type": "LORA", "r": config.rank, "lora_alpha": config.alpha, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    named = {f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor for name, tensor in adapters.items()}
    (folder / "adapter_model.safetensors").write_bytes(save(named))  # its `save_file` raises no OSError


def trainable_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that train."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def changing_names(model: nn.Module) -> list[str]:
    """Return the names of those of `merged_weights` that training changes: the others are the same in all versions."""
    adapted = {f"{name}.weight" for name in _layers(model)}
    trained = {without_adapter(name) for name in trainable_names(model) if not is_adapter(name)}
    return sorted(adapted | trained)


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters for the duration: the model computes as its base, bit for bit. No-op without adapters."""
    layers = list(_layers(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the full weights, W + (alpha / rank) B A for adapted layers; the model is left unchanged.

    Returns:
        Weights by the base model's parameter names, tied ones once, in the parameters' dtypes and placements. Weights
        without an adapter are the live ones, not copies.
    """
    layers = _layers(model)
    weights = {}
    for name, parameter in model.named_parameters():
        layer_name, is_base, rest = name.partition(".base_layer.")
        layer = layers.get(layer_name)
        if is_base and layer is not None:
            value = parameter.detach()
            if rest == "weight":
                value = (value + layer.get_delta_weight(_ADAPTER)).to(parameter.dtype)
            weights[f"{layer_name}.{rest}"] = value
        elif not is_adapter(name):
            weights[name] = parameter.detach()
    return weights


def adapter_deltas(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return what computes (alpha / rank) B A of each adapted layer, by the base model's name of the layer's weight."""
    return {f"{name}.weight": partial(layer.get_delta_weight, _ADAPTER) for name, layer in _layers(model).items()}


def _layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by name; doesn't import peft, which a model without adapters doesn't need."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}


def _target_layers(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Return the full names of the layers to adapt: those that end in a wanted name, or all but the head.

    Only layers of the text model count; and only those that compute what a linear layer does, unlike some routers.
    """
    head = model.get_output_embeddings()
    text = set(model.get_decoder().modules())
    linear = {name: module for name, module in model.named_modules() if _is_linear(module.__class__)}
    body = [name for name, module in linear.items() if module is not head and module in text]
    for target in wanted:
        if not any(_is_named(name, target) for name in body):
            is_head = any(_is_named(name, target) for name, each in linear.items() if each is head)
            reason = "is the LM head" if is_head else "is not a linear layer"
            raise ConfigError(
                f"model.lora.target_modules: {target!r} {reason} of {type(model).__name__}; "
                f"choose from {', '.join(last_parts(body))}"
            )
    if not body:
        raise ConfigError(f"model.lora: {type(model).__name__} has no linear layers to adapt; leave model.lora out")
    chosen = [name for name in body if not wanted or any(_is_named(name, target) for target in wanted)]
    _check_shared(model, [linear[name] for name in chosen], chosen, last_parts(body))
    return chosen


def _check_shared(model: PreTrainedModel, layers: Sequence[nn.Module], names: Sequence[str], body: list[str]) -> None:
    """Check that no two layers have the same weight (Zamba's): whose adapters would be added up."""
    weights = [id(layer.weight) for layer in layers]
    if shared := set(
        last_parts(name for name, weight in zip(names, weights, strict=True) if weights.count(weight) > 1)
    ):
        others = [part for part in body if part not in shared]
        advice = f"name others in model.lora.target_modules, of {', '.join(others)}" if others else "leave it out"
        raise ConfigError(
            f"model.lora: layers of {type(model).__name__} share the weights of {', '.join(sorted(shared))}, so merged "
            f"adapters would be added up; {advice}"
        )


@cache
def _is_linear(kind: type[nn.Module]) -> bool:
    """Return whether layers of a class compute what a linear layer does, as a small one of a subclass shows."""
    if kind in (nn.Linear, Conv1D):
        return True
    if not issubclass(kind, nn.Linear):
        return False
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        values = torch.arange(6, dtype=torch.float32).view(2, 3)
        try:
            layer = kind(3, 2)
            return torch.allclose(layer(values), nn.functional.linear(values, layer.weight, layer.bias))
        except Exception:  # noqa: BLE001 - of any type: it is built or called in another way than a linear layer
            return False


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the last parts of layers' names, such as q_proj, sorted."""
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
