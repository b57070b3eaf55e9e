"""The engine over a program in a process of its own, as seen by its rollout worker."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.engines.base import (
    EngineUsage,
    Generation,
    GenerationRequest,
    Sampling,
    WeightsBucket,
    check_held,
    check_prompts,
    require_awake,
)
from infra.engines.program import frames
from infra.engines.program.process import CallFailedError, EngineProcess, StartedEngine
from infra.models.flat_tensors import assign_slots, flat_bytes, shared_tensors, tensor_specs
from infra.models.load import check_weights
from infra.models.lora import is_adapter, save_adapters, without_adapter
from infra.storage.shared_memory import SharedFolder, choose_root
from schemas.config.model import LoraConfig
from schemas.errors import EngineLostError, NonFiniteError, WeightsError
from schemas.placement import EngineTag, MemoryChange, PartBytes
from schemas.weights import TensorSpec

PARTS: tuple[EngineTag, ...] = ("weights", "cache")


class ProgramRows:
    """`DecodingRows` of an engine that is a program; in vLLM, a turn computes at most a block of its history again."""

    def __init__(self, engine: "ProgramEngine", sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._lengths: dict[int, int] = {}  # tokens of the rows that are not forgotten
        self._pending: set[int] = set()  # rows whose turn has not ended
        self._limits: dict[int, int] = {}  # the most tokens of their turns
        self._num_begun = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._pending)

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        check_prompts(requests, self._sampling, self._engine.max_tokens)
        first, rows, stops = self._num_begun, list[tuple[int, int, int, int]](), list[tuple[str, ...]]()
        for prompt, request in enumerate(requests):
            for seed in request.seeds:
                limit = self._limits[self._num_begun] = request.token_limit(self._sampling)
                rows.append((self._num_begun, prompt, seed, limit))
                stops.append(request.stop)
                self._lengths[self._num_begun] = len(request.prompt_ids)
                self._pending.add(self._num_begun)
                self._num_begun += 1
        more = {"stop": stops} if any(stops) else {}
        self._engine.call("begin", {"rows": rows} | more, [_ids(request.prompt_ids) for request in requests])
        return range(first, self._num_begun)

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int, stop: tuple[str, ...] = ()) -> None:
        length = self._lengths[row] + len(token_ids)
        check_prompts(
            [GenerationRequest(np.empty(length), (seed,), max_tokens)], self._sampling, self._engine.max_tokens
        )
        self._lengths[row], self._limits[row] = length, max_tokens
        arguments = {"row": row, "seed": seed, "max_tokens": max_tokens} | ({"stop": stop} if stop else {})
        self._engine.call("extend", arguments, [_ids(token_ids)])
        self._pending.add(row)

    def branch(self, row: int, request: GenerationRequest) -> int:
        """Go on in another row, whose beginning the program may know; see `DecodingRows.branch`."""
        self.end(row)
        (number,) = self.begin([request])
        return number

    def step(self) -> list[tuple[int, Generation]]:
        """Run one forward pass of the rows that the program schedules; see `DecodingRows.step`."""
        result, buffers = self._engine.call("step")
        try:
            return self._read(result, buffers)
        except (KeyError, TypeError, ValueError) as error:
            raise self._engine.lose(f"it answered 'step' with what is no turn of a row: {error}") from error

    def _read(self, result: Mapping[str, Any], buffers: Sequence[bytearray]) -> list[tuple[int, Generation]]:
        """Return the turns that have ended, with what a program has answered to `step`."""
        if running := result["running"]:
            self._engine.usage.add(running, result["waiting"], result["cache"])
        found = []
        for (row, finish_reason, prefilled), tokens, logprobs in zip(
            result["rows"], buffers[::2], buffers[1::2], strict=True
        ):
            sampled = Generation(
                np.frombuffer(tokens, dtype=np.int32), np.frombuffer(logprobs, dtype=np.float32), finish_reason
            )
            if not np.isfinite(sampled.logprobs).all():
                raise NonFiniteError("the model's logits are not finite; its weights have diverged")
            limit, tokens_of_turn = self._limits[row], sampled.token_ids
            if not 1 <= len(tokens_of_turn) <= limit or len(tokens_of_turn) != len(sampled.logprobs):
                raise ValueError(
                    f"{len(tokens_of_turn)} tokens with {len(sampled.logprobs)} log-probs, expected 1 to {limit}"
                )
            if not 0 <= tokens_of_turn.min() <= tokens_of_turn.max() < self._engine.vocab_size:
                raise ValueError(f"a token id that is not below {self._engine.vocab_size}")
            if finish_reason not in ("stop", "length"):
                raise ValueError(f"the reason {finish_reason!r}, expected stop or length")
            self._pending.remove(row)
            self._lengths[row] += len(sampled.token_ids)
            self._engine.usage.prefilled += prefilled
            found.append((row, sampled))
        if self._pending and not (found or running or result["waiting"]):  # it would be asked again without end
            raise ValueError(f"no row runs or waits, but turns have not ended: {len(self._pending)}")
        return found

    def end(self, row: int) -> None:
        del self._lengths[row], self._limits[row]
        self._engine.call("end", {"row": row})

    def close(self) -> None:
        """Forget all rows, and abort those whose turn has not ended."""
        if not self._engine.is_lost:
            self._engine.call("abort")
        self._pending.clear()
        self._lengths.clear()
        self._limits.clear()


class ProgramEngine:
    """A `RolloutEngine` over a program.

    Unless `keep_prefixes`, the prefix cache is emptied before rows are opened, so that samples are a function of the
    calls since then and the weights.

    Attributes:
        version: The policy version of the weights; None after a load that failed, or if they are gone, as the engine
            slept without keeping them.
        dtype: The dtype of the weights.
        asleep: The parts that are out of the GPU's memory.
        usage: How much of it was in use.
        max_tokens: The most tokens of a row.
        vocab_size: All token ids are below it.
        processes: The ids of its ranks' processes.
    """

    def __init__(
        self,
        process: EngineProcess,
        started: StartedEngine,
        shapes: PreTrainedModel,
        *,
        keep_prefixes: bool = False,
        can_sleep: bool = False,
        lora: LoraConfig | None = None,
        shared_memory: str | None = None,
        verifies_buckets: bool = False,
    ) -> None:
        """Take over a process, whose weights are those of policy version 0; see `infra.engines.program.start`.

        Args:
            process: The program's.
            started: What it answered to `start`.
            shapes: The transformers model with the same weight names, on the meta device.
            keep_prefixes: Empty the prefix cache when weights are loaded, not when rows are opened.
            can_sleep: Whether it was started so that it can give up its memory.
            lora: The adapters that it is sent, which `shapes` then has too; None: its weights have them merged. With
                adapters, it keeps its weights in host memory while it sleeps, instead of dropping them.
            shared_memory: `runtime.shared_memory`, through which it gets adapters.
            verifies_buckets: Whether it is known to compare what it maps with its checksum.
        """
        self._process, self._shapes, self._lora, self._shared_memory = process, shapes, lora, shared_memory
        self._keep_prefixes, self._can_sleep = keep_prefixes, can_sleep
        self.version: int | None = 0
        self.dtype: str = started.dtype
        self.max_tokens, self.processes = started.max_model_len, started.processes
        embeddings = shapes.get_input_embeddings().weight
        assert isinstance(embeddings, torch.Tensor), "a model's input embeddings are a matrix"
        self.vocab_size = len(embeddings)
        self.verifies_buckets = verifies_buckets and lora is None  # adapters are not mapped
        self.asleep: frozenset[EngineTag] = frozenset()
        self.usage = EngineUsage()
        weights = sum(weight.numel() for weight in shapes.parameters())
        # Of all ranks, awake; of the weights, as many as there are in its dtype.
        self._sizes: PartBytes = {"weights": weights * started.itemsize, "cache": started.cache_bytes}

    @property
    def is_lost(self) -> bool:
        """Whether its process is gone."""
        return self._process.is_lost

    def open_rows(self, sampling: Sampling, *, several_turns: bool = False) -> ProgramRows:
        """Return a decoder without rows; see `RolloutEngine.open_rows`. All rows can be extended."""
        self.check()
        require_awake(self)
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": sampling.stop,
            "stop_token_ids": [int(token) for token in sampling.stop_token_ids],
        }
        self.call("open", {"sampling": settings, "forget_prefixes": not self._keep_prefixes})
        return ProgramRows(self, sampling)

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        """Copy weights into the engine's in place, bucket by bucket; see `RolloutEngine.load_weights`.

        Names are those of the transformers model's state dict, one of them for tied weights, of any floating dtype. If
        not complete, there are all or none of the tensors that vLLM fuses into one weight
        (`infra.weights.buckets.blocks`). If a bucket is damaged, or no memory is left, the engine has no version.
        """
        self.check()
        assert "weights" not in self.asleep, "an engine is woken before it loads weights"
        check_held(self.version, is_complete=is_complete)
        check_weights(self._shapes, specs, version, is_complete=is_complete)
        self.version = None
        adapters: dict[str, torch.Tensor] = {}
        has_base = any(not is_adapter(spec.name) for spec in specs)
        with self._loading_base() if has_base else nullcontext():
            for bucket in buckets:
                taken = {name: tensor for name, tensor in bucket.tensors.items() if is_adapter(name)}
                adapters |= {name: tensor.to("cpu", copy=True) for name, tensor in taken.items()}
                if len(taken) < len(bucket.tensors):
                    self._load_base(bucket, version)
        if adapters:
            assert self._lora is not None, "an engine without adapters has no such weights"
            with _saved(adapters, self._lora, self._shared_memory) as folder:
                self.call("replace_adapters", {"folder": str(folder), "version": version})
        self.version = version

    @contextmanager
    def _loading_base(self) -> Iterator[None]:
        self.call("start_load")
        try:
            yield
        finally:
            if not self.is_lost:
                self.call("finish_load")

    def _load_base(self, bucket: WeightsBucket, version: int) -> None:
        specs = tensor_specs(bucket.tensors)
        tensors = [
            (without_adapter(slot.spec.name), slot.spec.dtype, slot.spec.shape, slot.offset)
            for slot in assign_slots(specs)
            if not is_adapter(slot.spec.name)
        ]
        with shared_tensors(specs, bucket.tensors) if bucket.file is None else nullcontext(str(bucket.file)) as path:
            sizes = {"path": path, "num_bytes": flat_bytes(specs), "checksum": bucket.checksum}
            try:
                self._process.call("load", sizes | {"tensors": tensors})
            except CallFailedError as error:
                if error.type != frames.ChecksumError.__name__:
                    raise self.lose(f"{error.type}: {error}") from error
                raise WeightsError(
                    f"a bucket of the weights of version {version} is damaged as {self._process.name}'s process "
                    f"{self._process.pid} maps it: {error}; the engine has no version now: publish them again"
                ) from error

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Give up memory; with the weights, the cache too. See `RolloutEngine.sleep`.

        On a CPU, an engine can't: everything is kept, and reported as such.
        """
        self.check()
        if not self._can_sleep:
            return MemoryChange(kept={tag: self._sizes[tag] for tag in tags}, resident=self._sizes)
        before = self.asleep
        if "weights" in tags and "weights" not in before:
            if not self._keeps_weights:
                self.version = None
            self.call("sleep", {"weights": True, "keep": self._keeps_weights})
            self.asleep = frozenset(PARTS)
        elif "cache" in tags and "cache" not in before:
            self.call("sleep", {"weights": False})
            self.asleep |= {"cache"}
        return self._change(self.asleep - before)

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate memory again; see `RolloutEngine.wake`."""
        self.check()
        if woken := self.asleep & frozenset(tags):
            try:
                self._process.call("wake", {"parts": sorted(woken, reverse=True)})
            except CallFailedError as error:
                raise self._process.lose(
                    f"it could not wake up {' and '.join(sorted(woken))}: {error}; if the GPU's memory is full, lower "
                    "rollout.gpu_memory_utilization"
                ) from error
            self.asleep -= woken
        return self._change(woken)

    @property
    def _keeps_weights(self) -> bool:
        return self._lora is not None

    def _change(self, changed: frozenset[EngineTag]) -> MemoryChange:
        moved = changed & {"weights"} if self._keeps_weights else frozenset()
        return MemoryChange(
            moved={tag: self._sizes[tag] for tag in moved},
            freed={tag: self._sizes[tag] for tag in changed - moved},
            resident={tag: self._sizes[tag] for tag in PARTS if tag not in self.asleep},
        )

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        self.check()
        _, buffers = self.call("score", {"temperature": temperature}, [_ids(token_ids)])
        if [len(buffer) for buffer in buffers] != [4 * (num_scored := len(token_ids) - 1)]:
            raise self.lose(f"it answered 'score' without the log-probs, float32, of {num_scored} tokens")
        return np.frombuffer(buffers[0], dtype=np.float32)

    def check(self) -> None:
        self._process.check()

    def take_peak_memory(self) -> dict[str, int]:
        """Return the peak memory of the rank that took most; see `RolloutEngine.take_peak_memory`."""
        peaks, _ = self.call("peak_memory")
        if not all(type(num_bytes) is int for num_bytes in peaks.values()):
            raise self.lose(f"it answered 'peak_memory' with what are no bytes by kind: {peaks}")
        return peaks

    def close(self) -> None:
        self._process.close()

    def call(
        self, name: str, arguments: Mapping[str, Any] | None = None, buffers: Sequence[Any] = ()
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Call the program; if it fails, the engine is closed: its ranks may wait for one another forever.

        Raises:
            EngineLostError: It failed or died.
        """
        try:
            return self._process.call(name, arguments, buffers)
        except CallFailedError as error:
            raise self.lose(f"{error.type}: {error}") from error

    def lose(self, reason: str) -> EngineLostError:
        """End the process for a reason, and return the error that says so."""
        return self._process.lose(reason)


@contextmanager
def _saved(adapters: Mapping[str, torch.Tensor], lora: LoraConfig, shared_memory: str | None) -> Iterator[Path]:
    """Write a version's adapters to a folder in the node's memory, in peft's format; provide it during the block."""
    num_bytes = sum(tensor.nbytes for tensor in adapters.values())
    folder = SharedFolder(choose_root(shared_memory, num_bytes), "adapters")
    try:
        save_adapters(adapters, lora, folder.path)
        yield folder.path
    except OSError as error:
        raise WeightsError(
            f"{folder.path} has no space for {num_bytes} bytes of adapters: {error.strerror}; enlarge its file system "
            "(for Docker: --shm-size), or set runtime.shared_memory to another folder"
        ) from None
    finally:
        folder.remove()


def _ids(token_ids: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(token_ids, dtype=np.int32)
