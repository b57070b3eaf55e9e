"""What runs in vLLM's workers: one per tensor-parallel rank, in the program's process if it is the only one.

vLLM mixes `RankMethods` into its worker class by import name, and calls its methods by name: no function is pickled.
The program has loaded the protocol as `sluice_frames`, in each rank's process, too.
"""

import math
import mmap
import os
import resource
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any

import numpy as np
import torch

KIB = 1024
SUMS = "/dev/shm/vllm_dist_"  # of a CPU's ranks; Python's tracker knows the rest of their shared memory


class RankMethods:
    """The methods that the program calls on every rank, mixed into vLLM's worker."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    _adapted: dict[str, torch.nn.Module]  # vLLM's layers with adapters, during a load

    def skip_compiling(self) -> None:
        """Run functions that vLLM decorates with `torch.compile` uncompiled, from now on."""
        torch.compiler.set_stance("force_eager")

    def unname_shared_memory(self) -> None:
        """Remove the names of what a CPU's ranks sum their parts in: all have mapped it, and it now ends with them."""
        with open("/proc/self/maps") as maps:
            for path in {line[at:].rstrip("\n") for line in maps if (at := line.find(SUMS)) >= 0}:
                with suppress(FileNotFoundError):  # another rank was first
                    os.unlink(path)

    def process_id(self) -> int:
        """Return the id of the rank's process."""
        return os.getpid()

    def take_peak_memory(self) -> dict[str, int]:
        """Return the peak memory of the rank's process in bytes, by kind, as `rl_core.telemetry` does."""
        device = self.model_runner.device
        if device.type != "cuda":
            return {"rss": KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"allocated": allocated, "reserved": reserved}

    def cache_bytes(self) -> int:
        """Return the bytes of the rank's KV cache."""
        storages = {cache.untyped_storage().data_ptr(): cache for cache in _tensors(self.model_runner.kv_caches)}
        return sum(cache.untyped_storage().nbytes() for cache in storages.values())

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

    def load_mapped(
        self, path: str, num_bytes: int, checksum: str, tensors: Sequence[tuple[str, str, Sequence[int], int]]
    ) -> str:
        """Copy this rank's part of whole tensors into its weights, from a file that is mapped, not read.

        Returns the checksum of what is mapped; if that is another one, nothing is copied.

        Args:
            path: The file.
            num_bytes: Its size.
            checksum: Its checksum.
            tensors: The name by the transformers model, the dtype, the shape and the offset in bytes of each.
        """
        with open(path, "rb") as file:  # all of its pages are there: mapped at once, not one by one when they are read
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(file.fileno(), num_bytes, flags=flags, prot=mmap.PROT_READ)
        with warnings.catch_warnings():  # torch has no read-only tensors
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        found: str = import_module("sluice_frames").checksum(np.frombuffer(memory, dtype=np.int64))
        if found == checksum:
            with self._vllm_settings():
                self.model_runner.get_model().load_weights(_views(buffer, tensors))
        return found

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


def _views(
    buffer: torch.Tensor, tensors: Sequence[tuple[str, str, Sequence[int], int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, offset in tensors:
        dtype = getattr(torch, dtype_name)
        yield name, buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def _adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that apply adapters, by name; each wraps one of the base model."""
    from vllm.lora.layers import BaseLayerWithLoRA

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)}


def _logits_processor(model: torch.nn.Module) -> Any:
    """Return the module that scales the model's logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if len(found) != 1:
        raise NotImplementedError(
            f"vLLM's {type(model).__name__} has {len(found)} logits processors, expected 1; use rollout.kind = "
            "'transformers' for this model"
        )
    return found[0]


def _repack_head(model: torch.nn.Module) -> None:
    """Repack the output head: if it is tied to the embeddings, vLLM's reload doesn't update a CPU's packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
