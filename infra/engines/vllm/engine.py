"""The vLLM engine: scheduled in the calling process. vLLM is imported when one is started, and by no other package.

With one rank, the model is in the calling process too. With tensor parallelism, each rank is a process of vLLM's own on
this machine; they end when the calling process does, however it ends.

Contract of the log-probs: vLLM's raw log-probs are computed before the temperature is applied, its processed ones after
top-k, top-p and min-p. So the temperature is folded into the model's own logit scale and vLLM samples at temperature 1:
its raw log-probs are then log-softmax(logits / temperature), before any truncation.
"""

import gc
import multiprocessing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from infra.engines.base import EngineUsage, Generation, GenerationRequest, Sampling, WeightsBucket
from infra.engines.checks import check_held, check_prompts, require_awake
from infra.engines.vllm.adapters import VllmAdapters, check_layers
from infra.engines.vllm.ranks import mapped
from infra.models.load import check_weights
from infra.models.lora import is_adapter
from schemas.errors import EngineLostError, NonFiniteError, describe
from schemas.placement import EngineTag, MemoryChange, PartBytes
from schemas.weights import TensorSpec

_VLLM_TAGS: dict[EngineTag, str] = {"weights": "weights", "cache": "kv_cache"}


def vllm_params(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """Return vLLM's parameters for one sample of at most `max_tokens`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0 if sampling.temperature > 0 else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the model's own is one of the stop tokens
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """Return vLLM's parameters of a request for the log-probs of its prompt; it also samples one token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_logprobs(output: Any) -> np.ndarray:
    """Return the log-probs of a finished request's prompt: float32 [T - 1], of all tokens but the first."""
    tokens, entries = output.prompt_token_ids, output.prompt_logprobs
    return np.array([entries[at][tokens[at]].logprob for at in range(1, len(tokens))], dtype=np.float32)


def generation(output: Any) -> Generation:
    """Translate a finished `CompletionOutput`."""
    logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("the model's logits are not finite; its weights have diverged")
    assert output.finish_reason in ("stop", "length"), output.finish_reason
    return Generation(np.array(output.token_ids, dtype=np.int32), logprobs, output.finish_reason)


class VllmRows:
    """`DecodingRows` of a vLLM engine; a turn computes at most a block of its row's history again.

    Args:
        engine: The engine.
        sampling: How tokens are sampled.
        max_tokens: The most tokens of a row.
    """

    def __init__(self, engine: "VllmEngine", sampling: Sampling, max_tokens: int) -> None:
        self._engine, self._sampling, self._max_tokens = engine, sampling, max_tokens
        self._histories: dict[int, np.ndarray] = {}  # of rows that are not forgotten: all their tokens so far
        self._pending: dict[int, str] = {}  # vLLM's request ids of the rows whose turn has not ended
        self._num_begun = 0

    @property
    def num_unfinished(self) -> int:
        """The number of rows whose turn has not ended."""
        return len(self._pending)

    def begin(self, requests: Sequence[GenerationRequest]) -> range:
        """Add a row per sample; see `DecodingRows.begin`."""
        check_prompts(requests, self._sampling, self._max_tokens)
        first = self._num_begun
        for request in requests:
            for seed in request.seeds:
                self._histories[self._num_begun] = np.asarray(request.prompt_ids)
                self._add(self._num_begun, seed, request.token_limit(self._sampling))
                self._num_begun += 1
        return range(first, self._num_begun)

    def extend(self, row: int, token_ids: np.ndarray, seed: int, max_tokens: int) -> None:
        """Add the next turn of a row whose turn has ended; see `DecodingRows.extend`."""
        history = np.concatenate([self._histories[row], token_ids])
        check_prompts([GenerationRequest(history, (seed,), max_tokens)], self._sampling, self._max_tokens)
        self._histories[row] = history
        self._add(row, seed, max_tokens)

    def step(self) -> list[tuple[int, Generation]]:
        """Run one forward pass of the rows that vLLM schedules; see `DecodingRows.step`."""
        found = []
        for output in self._engine.step():
            row, sampled = int(output.request_id), generation(output.outputs[0])
            del self._pending[row]
            self._engine.usage.prefilled += len(self._histories[row]) - (output.num_cached_tokens or 0)
            self._histories[row] = np.concatenate([self._histories[row], sampled.token_ids])
            found.append((row, sampled))
        return found

    def end(self, row: int) -> None:
        """Forget a row whose turn has ended."""
        del self._histories[row]

    def close(self) -> None:
        """Forget all rows, and abort those whose turn has not ended."""
        self._engine.abort(list(self._pending.values()))
        self._pending.clear()
        self._histories.clear()

    def _add(self, row: int, seed: int, max_tokens: int) -> None:
        params = vllm_params(self._sampling, seed, max_tokens)
        self._pending[row] = self._engine.add_request(str(row), self._histories[row].tolist(), params)


class VllmEngine:
    """A `RolloutEngine` over vLLM.

    Unless `keep_prefixes`, the prefix cache is emptied before rows are opened, so that samples are a function of the
    calls since then and the weights.

    Attributes:
        version: The policy version of the weights; None after a load that failed, or if they are gone, as the engine
            slept without keeping them.
        dtype: The dtype of the weights.
        asleep: The parts that are out of the GPU's memory.
        usage: How much of it was in use.
    """

    def __init__(
        self,
        engine: Any,
        shapes: PreTrainedModel,
        *,
        num_ranks: int = 1,
        eager: bool,
        keep_prefixes: bool = False,
        can_sleep: bool = False,
        adapters: VllmAdapters | None = None,
    ) -> None:
        """Wrap an engine, whose weights are those of policy version 0; see `open_vllm`.

        Args:
            engine: vLLM's `LLMEngine`, which steps in this process; its workers have `RankMethods`.
            shapes: The transformers model with the same weight names, on the meta device.
            num_ranks: Its tensor-parallel ranks.
            eager: Don't let vLLM compile the small functions of its sampler.
            keep_prefixes: Empty the prefix cache when weights are loaded, not when rows are opened.
            can_sleep: Whether it was started in vLLM's sleep mode, which its CPU build lacks.
            adapters: How it gets adapters, which `shapes` then has too; None: its weights have them merged. With
                adapters, it keeps its weights in host memory while it sleeps, instead of dropping them.
        """
        self._engine, self._shapes, self._num_ranks = engine, shapes, num_ranks
        self._eager, self._keep_prefixes = eager, keep_prefixes
        self._can_sleep, self._part_bytes = can_sleep, PartBytes()
        self._adapters = adapters
        self._lost = ""  # why its ranks are gone
        self._processes: list[int] = []  # of ranks with their own
        self.version: int | None = 0
        self.dtype = str(engine.model_config.dtype).removeprefix("torch.")
        self.asleep: frozenset[EngineTag] = frozenset()
        self.usage = EngineUsage()
        if num_ranks > 1:
            self._processes = self._call_ranks("process_id")
        if eager and num_ranks > 1:
            self._call_ranks("skip_compiling")
        if adapters is not None:
            check_layers(shapes, self._call_ranks("adapted_layers")[0])
        self._scale: float = self._call_ranks("logit_scale")[0]  # the model's own

    def open_rows(self, sampling: Sampling, *, several_turns: bool = False) -> VllmRows:
        """Return a decoder without rows; see `RolloutEngine.open_rows`. All rows can be extended.

        Raises:
            EngineLostError: A rank's process failed or died; the engine has closed.
            VersionError: The engine is asleep, or has no weights.
        """
        self.check()
        require_awake(self)
        assert not self._engine.has_unfinished_requests(), "an engine generates for one caller at a time"
        if not self._keep_prefixes:
            self._forget_prefixes()
        self._scale_logits(sampling.temperature)
        return VllmRows(self, sampling, self._engine.model_config.max_model_len)

    def load_weights(
        self, specs: Sequence[TensorSpec], buckets: Iterable[WeightsBucket], version: int, *, is_complete: bool = True
    ) -> None:
        """Copy weights into the engine's in place, bucket by bucket; see `RolloutEngine.load_weights`.

        Args:
            specs: The tensors, by the transformers model's state-dict names, of any floating dtype; for tied weights,
                one name is enough.
            buckets: The buckets.
            version: Their policy version.
            is_complete: Whether they are all of the model's weights; else, of the tensors that vLLM fuses into one
                weight, all or none (`infra.weights.buckets.blocks`).

        Raises:
            WeightsError: A name or shape is not the model's, or a weight is missing; nothing has been copied.
            EngineLostError: A rank's process failed or died; the engine has closed.
        """
        self.check()
        assert "weights" not in self.asleep, "an engine is woken before it loads weights"
        check_held(self.version, is_complete=is_complete)
        check_weights(self._shapes, specs, version, is_complete=is_complete)
        self.version = None
        adapters: dict[str, torch.Tensor] = {}
        with self._loading_base() if any(not is_adapter(spec.name) for spec in specs) else nullcontext():
            for bucket in buckets:
                taken = {name: tensor for name, tensor in bucket.tensors.items() if is_adapter(name)}
                adapters |= {name: tensor.to("cpu", copy=True) for name, tensor in taken.items()}
                if len(taken) < len(bucket.tensors):
                    self._load_base(bucket)
        if adapters:
            self._replace_adapters(adapters, version)
        self._forget_prefixes()
        self.version = version

    @contextmanager
    def _loading_base(self) -> Iterator[None]:
        self._call_ranks("start_load")
        try:
            yield
        finally:
            if not self._lost:
                self._call_ranks("finish_load")

    def _load_base(self, bucket: WeightsBucket) -> None:
        if self._num_ranks == 1:
            self._call_ranks("load_tensors", bucket.tensors)
        else:
            with mapped(bucket) as arguments:
                self._call_ranks("load_mapped", *arguments)

    def _replace_adapters(self, adapters: Mapping[str, torch.Tensor], version: int) -> None:
        assert self._adapters is not None, "an engine without adapters has no such weights"
        with self._adapters.saved(adapters, version) as request, self._closed_if_lost():
            if (held := self._adapters.request) is not None:
                self._adapters.request = None
                self._engine.remove_lora(held.lora_int_id)
            self._engine.add_lora(request)
            self._adapters.request = request

    def sleep(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Give up memory by vLLM's sleep mode; with the weights, the cache too. See `RolloutEngine.sleep`.

        vLLM's CPU build has no sleep mode: there, everything is kept, and reported as such.
        """
        self.check()
        sizes = self._sizes()
        if not self._can_sleep:
            return MemoryChange(kept={tag: sizes[tag] for tag in tags}, resident=sizes)
        before = self.asleep
        if "weights" in tags and "weights" not in before:
            if not self._keeps_weights:
                self.version = None
            # Level 2 discards weights and cache; level 1 copies the weights, adapters too, to host memory.
            self._engine.sleep(level=1 if self._keeps_weights else 2)
            self.asleep = frozenset(_VLLM_TAGS)
        elif "cache" in tags and "cache" not in before:
            self._engine.sleep(level=0)  # pauses, which the next call requires
            self._engine.release_kv_cache_memory()
            self.asleep |= {"cache"}
        return self._change(self.asleep - before)

    def wake(self, tags: Collection[EngineTag]) -> MemoryChange:
        """Allocate memory again; see `RolloutEngine.wake`.

        Raises:
            EngineLostError: It can't, e.g. as the GPU has too little memory; the engine has closed.
        """
        self.check()
        woken = self.asleep & frozenset(tags)
        if woken:
            try:
                self._engine.wake_up([_VLLM_TAGS[tag] for tag in sorted(woken, reverse=True)])
            except RuntimeError as error:
                self._lost = (
                    f"vLLM could not wake up {' and '.join(sorted(woken))}, and was closed: {describe(error)}; if the "
                    "GPU's memory is full, lower rollout.gpu_memory_utilization"
                )
                self.close()
                raise EngineLostError(self._lost) from error
            self.asleep -= woken
        return self._change(woken)

    def _sizes(self) -> PartBytes:
        """Return the bytes of its parts on all ranks, awake; of the weights, as many as there are in its dtype."""
        if not self._part_bytes:  # a CPU's kernels pack weights, which are then no parameters any more
            weights = sum(weight.numel() for weight in self._shapes.parameters())
            itemsize = self._engine.model_config.dtype.itemsize
            self._part_bytes = {"weights": weights * itemsize, "cache": sum(self._call_ranks("cache_bytes"))}
        return self._part_bytes

    @property
    def _keeps_weights(self) -> bool:
        return self._adapters is not None

    def _change(self, changed: frozenset[EngineTag]) -> MemoryChange:
        sizes = self._sizes()
        moved = changed & {"weights"} if self._keeps_weights else frozenset()
        return MemoryChange(
            moved={tag: sizes[tag] for tag in moved},
            freed={tag: sizes[tag] for tag in changed - moved},
            resident={tag: sizes[tag] for tag in _VLLM_TAGS if tag not in self.asleep},
        )

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Return the log-probs of given tokens; see `RolloutEngine.score`."""
        self.check()
        self._scale_logits(temperature)
        self.add_request("score", token_ids.tolist(), scoring_params())
        while not (outputs := self.step()):
            pass
        self.step()  # as `abort` does
        self._forget_prefixes()
        return prompt_logprobs(outputs[0])

    def check(self) -> None:
        """Check that the engine has not lost a process.

        Raises:
            EngineLostError: It has; another engine must be started.
        """
        if self._lost:
            raise EngineLostError(self._lost)
        alive = {child.pid for child in multiprocessing.active_children()} if self._processes else set()
        if dead := [rank for rank, process in enumerate(self._processes) if process not in alive]:
            raise self._close_lost(f"rank {dead[0]} died")

    def take_peak_memory(self) -> dict[str, int]:
        """Return the peak memory of the rank that took most; see `RolloutEngine.take_peak_memory`."""
        self.check()
        peaks: list[dict[str, int]] = self._call_ranks("take_peak_memory")
        return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}

    def close(self) -> None:
        """Release the weights and the KV cache, and end the ranks; the engine can't generate afterwards."""
        if (engine := self._engine) is not None:
            self._engine, self._processes = None, []
            engine.engine_core.shutdown()
            del engine
            gc.collect()  # the model runner and its caches refer to one another

    def _call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `RankMethods` on all ranks, and return their results."""
        with self._closed_if_lost():
            found: list[Any] = self._engine.collective_rpc(method, args=arguments)
        return found

    @contextmanager
    def _closed_if_lost(self) -> Iterator[None]:
        """With ranks in processes of their own, close the engine if one fails: the others may wait for it forever."""
        try:
            yield
        except Exception as error:
            if self._num_ranks == 1:
                raise
            raise self._close_lost(describe(error)) from error

    def _close_lost(self, reason: str) -> EngineLostError:
        """Close the engine, which has lost a rank, and return the error that says so."""
        self._lost = f"vLLM's {self._num_ranks} tensor-parallel processes failed, and were ended: {reason}"
        self.close()
        return EngineLostError(self._lost)

    def _forget_prefixes(self) -> None:
        was_emptied = self._engine.reset_prefix_cache()
        assert was_emptied, "blocks of the KV cache are in use without any requests"

    def _scale_logits(self, temperature: float) -> None:
        scale = self._scale / temperature if temperature > 0 else self._scale
        self._call_ranks("set_logit_scale", scale)

    def add_request(self, name: str, prompt: list[int], params: Any) -> str:
        """Add one sample as a request, and return vLLM's own id for it."""
        from vllm.inputs.engine import tokens_input

        adapters = self._adapters.request if self._adapters else None
        internal_id: str = self._engine.add_request(name, tokens_input(prompt), params, lora_request=adapters)
        return internal_id

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests, by vLLM's own ids, if the engine is not lost."""
        if not self._lost:
            self._engine.abort_request(request_ids, internal=True)
            self.step()  # informs the model runner of the finished requests, so that the next call finds it empty

    def step(self) -> list[Any]:
        """Run one forward pass of the scheduled requests, and return the outputs that it finished."""
        with no_compiling(self._eager), self._closed_if_lost():
            outputs: list[Any] = self._engine.step()
        scheduler = self._engine.engine_core.engine_core.scheduler
        unfinished, waiting = scheduler.get_request_counts()
        if running := unfinished + len(outputs):
            self.usage.add(running, waiting, scheduler.get_kv_cache_usage())
        return outputs


def no_compiling(eager: bool) -> AbstractContextManager[Any]:
    """If `eager`, run functions that vLLM decorates with `torch.compile` uncompiled: compiling takes 4 to 20 s."""
    return torch.compiler.set_stance("force_eager") if eager else nullcontext()
