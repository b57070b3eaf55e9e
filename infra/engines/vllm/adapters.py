"""LoRA adapters that vLLM computes with as such: which ones it can, and how it gets those of a version.

vLLM takes adapters from a folder in peft's format. It is written to the node's memory, and removed once all ranks have
read it.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from infra.models.lora import adapted_layers
from infra.storage.shared_memory import SharedFolder, choose_root
from rl_core.model_folder import load_config
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import ConfigError, WeightsError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates for
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as models' configs name them
MERGED = 'set model.lora.publish = "merged"'


class VllmAdapters:
    """How an engine gets adapters.

    Args:
        lora: Their rank and scale.
        shared_memory: `runtime.shared_memory`, where they are handed over.

    """

    def __init__(self, lora: LoraConfig, shared_memory: str | None) -> None:
        self.lora, self._shared_memory = lora, shared_memory

    @contextmanager
    def saved(self, adapters: Mapping[str, Tensor]) -> Iterator[Path]:
        """Provide a version's adapters in a folder, which exists during the block.

        Args:
            adapters: All adapters' weights by the policy's names, on the CPU.

        Raises:
            WeightsError: No space is left for them.
        """
        num_bytes = sum(tensor.nbytes for tensor in adapters.values())
        folder = SharedFolder(choose_root(self._shared_memory, num_bytes), "adapters")
        try:
            self._write(adapters, folder.path)
            yield folder.path
        finally:
            folder.remove()

    def _write(self, adapters: Mapping[str, Tensor], folder: Path) -> None:
        layers = {name.partition(".lora_")[0] for name in adapters}
        settings = {"r": self.lora.rank, "lora_alpha": self.lora.alpha, "target_modules": suffixes(layers)}
        try:
            (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | settings))
            save_file(
                {_peft_name(name): tensor for name, tensor in adapters.items()}, folder / "adapter_model.safetensors"
            )
        except OSError as error:
            raise WeightsError(
                f"{folder} has no space for adapters: {error.strerror}; enlarge it (for Docker: --shm-size), or set "
                "runtime.shared_memory to another folder"
            ) from None


def check_adapters(model: ModelConfig) -> None:
    """Check that vLLM can compute with a model's adapters, if it is to.

    Raises:
        ConfigError: It can't.
    """
    if model.lora is None or not model.publishes_adapters:
        return
    if model.lora.rank > RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank = {model.lora.rank}, but vLLM computes with adapters of rank {RANKS[-1]} at most; lower "
            f"it, or {MERGED}"
        )
    config = load_config(model.path).get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        raise ConfigError(
            f'model.lora.publish = "adapters" can\'t be used with rollout.kind = "vllm" and a mixture of experts, '
            f"as {model.path} is: vLLM has adapters of other layers there; {MERGED}, or rollout.kind = 'transformers'"
        )


def check_layers(shapes: nn.Module, wrapped: Collection[str]) -> None:
    """Check that vLLM has a place for the adapters of every layer.

    Args:
        shapes: The adapted transformers model.
        wrapped: The names of vLLM's layers that have one; a layer fuses several of a block, such as q, k and v.

    Raises:
        ConfigError: It lacks some.
    """
    blocks = {name.rpartition(".")[0] for name in wrapped}
    if lacking := [name for name in adapted_layers(shapes) if name.rpartition(".")[0] not in blocks]:
        raise ConfigError(
            f'model.lora.publish = "adapters": vLLM has no adapter for {lacking[0]} of this model; {MERGED}'
        )


def adapter_arguments(shapes: nn.Module, lora: LoraConfig) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs` for adapters of the same layers, of one version at a time."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": allocated_rank(lora.rank),
        "lora_target_modules": suffixes(adapted_layers(shapes)),  # of other layers, vLLM would compute zeros
    }


def allocated_rank(rank: int) -> int:
    """Return the rank that vLLM allocates memory for."""
    return next(allocated for allocated in RANKS if allocated >= rank)


def suffixes(layers: Collection[str]) -> list[str]:
    """Return the last parts of layers' names, such as q_proj, sorted."""
    return sorted({name.rpartition(".")[2] for name in layers})


def _peft_name(name: str) -> str:
    """Return the name in peft's files of an adapter's weight."""
    return "base_model.model." + name.replace(".default.", ".")
