"""What runs in vLLM's workers: one per tensor-parallel rank, in the engine's process if it is the only one.

vLLM mixes `RankMethods` into its worker class by import name, and calls its methods by name: no function is pickled.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from infra.engines.base import WeightsBucket
from infra.models.flat_tensors import buffer_as_tensor, flat_bytes, tensor_specs, tensor_views, write_tensors
from infra.models.lora import is_adapter, without_adapter
from rl_core.storages import storage_bytes
from rl_core.telemetry import take_peak_memory
from schemas.errors import ConfigError
from schemas.weights import TensorSpec


class RankMethods:
    """The methods that the engine calls on every rank, mixed into vLLM's worker."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    _adapted: dict[str, torch.nn.Module]  # vLLM's layers with adapters, during a load

    def skip_compiling(self) -> None:
        """Run functions that vLLM decorates with `torch.compile` uncompiled, from now on."""
        torch.compiler.set_stance("force_eager")

    def process_id(self) -> int:
        """Return the id of the rank's process."""
        return os.getpid()

    def take_peak_memory(self) -> dict[str, int]:
        """Return the peak memory of the rank's process; see `rl_core.telemetry.take_peak_memory`."""
        return take_peak_memory(self.model_runner.device)

    def cache_bytes(self) -> int:
        """Return the bytes of the rank's KV cache."""
        return storage_bytes(self.model_runner.kv_caches)

    def logit_scale(self) -> float:
        """Return the factor of the model's logits."""
        return float(_logits_processor(self.model_runner.get_model()).scale)

    def set_logit_scale(self, scale: float) -> None:
        """Set the factor of the model's logits."""
        _logits_processor(self.model_runner.get_model()).scale = scale

    def start_load(self) -> None:
        """Prepare to load weights in parts: vLLM fills each of its layers once that has all its tensors."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        self._adapted = _adapted_layers(model)
        for name, layer in self._adapted.items():  # it finds weights by the base model's names only
            model.set_submodule(name, layer.base_layer)
        with self._vllm_settings():
            initialize_layerwise_reload(model)

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of whole tensors, by the transformers model's names, into its weights, but adapters."""
        base = ((without_adapter(name), tensor) for name, tensor in tensors.items() if not is_adapter(name))
        with self._vllm_settings():
            self.model_runner.get_model().load_weights(base)

    def load_mapped(self, path: str, specs: Sequence[TensorSpec]) -> None:
        """Do `load_tensors` from a flat buffer in a file that is mapped, not read: only this rank's part is copied."""
        buffer = torch.from_file(path, shared=False, size=flat_bytes(specs), dtype=torch.uint8)
        self.load_tensors(tensor_views(buffer, specs))

    def finish_load(self) -> None:
        """Finish what `start_load` began, also if not all tensors came; layers without any keep their weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with self._vllm_settings():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        _repack_head(model)
        for name, layer in self._adapted.items():
            model.set_submodule(name, layer)

    def adapted_layers(self) -> list[str]:
        """Return the names of vLLM's layers that adapters are applied to."""
        return list(_adapted_layers(self.model_runner.get_model()))

    def _vllm_settings(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


@contextmanager
def mapped(bucket: WeightsBucket) -> Iterator[tuple[str, Sequence[TensorSpec]]]:
    """Provide a bucket to other processes of this machine, during the block, as the arguments of `load_mapped`.

    Without a file, its tensors are copied to one that has no name, in memory.

    Raises:
        OSError: No memory is left for the copy.
    """
    specs = tensor_specs(bucket.tensors)
    if bucket.file is not None:
        yield str(bucket.file), specs
        return
    descriptor = os.memfd_create("weights")  # it ends with this block, however the process ends
    try:
        os.posix_fallocate(descriptor, 0, flat_bytes(specs))
        buffer = buffer_as_tensor(mmap.mmap(descriptor, flat_bytes(specs)))
        write_tensors(buffer, specs, bucket.tensors.items())
        yield f"/proc/{os.getpid()}/fd/{descriptor}", specs
    finally:
        os.close(descriptor)


def _adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that apply adapters, by name; each wraps one of the base model."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)}


def _logits_processor(model: torch.nn.Module) -> Any:
    """Return the module that scales the model's logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1:
        raise ConfigError(
            f"rollout.kind = 'vllm': vLLM's {type(model).__name__} has {len(found)} logits processors, expected 1; "
            "use rollout.kind = 'transformers' for this model"
        )
    return found[0]


def _repack_head(model: torch.nn.Module) -> None:
    """Repack the output head: if it is tied to the embeddings, vLLM's reload doesn't update a CPU's packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
