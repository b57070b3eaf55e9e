"""vLLM as users call it, in one process: a program for `engine_side_by_side`, in the interpreter with vLLM.

It starts vLLM as Sluice's program does, and times what it calls itself, without what asks it.
"""

import importlib.util
import math
import mmap
import socket
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "infra" / "engines" / "vllm" / "vllm_program.py"
_spec = importlib.util.spec_from_file_location("vllm_program", PROGRAM)
assert _spec is not None
assert _spec.loader is not None
vllm_program: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(vllm_program)

Reply = tuple[dict[str, Any], list[Any]]


class RawVllm(vllm_program.VllmProgram):  # type: ignore[misc]
    """Calls of a protocol like Sluice's; each answers with the seconds that vLLM took."""

    def hold(self, arguments: dict[str, Any], buffers: list[bytearray]) -> Reply:
        """Read a version's weights from a file into this process's memory; see `RankMethods.load_mapped`."""
        data = bytearray(Path(arguments["path"]).read_bytes())
        self._held = getattr(self, "_held", {})
        self._held[arguments["version"]] = _tensors(data, arguments["tensors"])
        return {}, []

    def reload(self, arguments: dict[str, Any], buffers: list[bytearray]) -> Reply:
        """Load a version that is held, and once more from its file; return the seconds of both.

        Its file is mapped and its checksum computed, as a worker does with an engine in its own process.
        """
        import numpy as np

        began = time.perf_counter()
        self._reload(self._held[arguments["version"]])
        ended = time.perf_counter()
        with open(arguments["path"], "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        vllm_program.frames.checksum(np.frombuffer(mapped, dtype=np.int64))
        self._reload(_tensors(mapped, arguments["tensors"]))
        del mapped
        return {"seconds": ended - began, "mapped_seconds": time.perf_counter() - ended}, []

    def _reload(self, tensors: dict[str, Any]) -> None:
        self._engine.collective_rpc(_load, args=(tensors,))
        self._engine.reset_prefix_cache()

    def generate(self, arguments: dict[str, Any], buffers: list[bytearray]) -> Reply:
        """Sample one response for each prompt, by its seed; return all tokens and log-probs, too."""
        import numpy as np
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        prompts = [memoryview(buffer).cast("i").tolist() for buffer in buffers]
        began = time.perf_counter()
        self._engine.reset_prefix_cache()
        for number, (prompt, seed) in enumerate(zip(prompts, arguments["seeds"], strict=True)):
            params = SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=arguments["max_tokens"],
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(str(number), tokens_input(prompt), params)
        found = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found[int(output.request_id)] = output.outputs[0]
        seconds = time.perf_counter() - began
        self._engine.step()
        ordered = [found[number] for number in range(len(prompts))]
        tokens = [np.array(each.token_ids, dtype=np.int32) for each in ordered]
        return {"seconds": seconds}, tokens + [np.array(each.logprobs.logprobs, dtype=np.float32) for each in ordered]


def _tensors(data: Any, slots: list[Any]) -> dict[str, Any]:
    """Return views of a bucket's bytes."""
    import torch

    return {
        name: torch.frombuffer(data, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset).view(*shape)
        for name, dtype, shape, offset in slots
    }


def _load(worker: Any, tensors: dict[str, Any]) -> None:
    """Copy tensors of this process into vLLM's weights, by its own reload."""
    from vllm.config import set_current_vllm_config

    worker.start_load()
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(iter(tensors.items()))
    worker.finish_load()


if __name__ == "__main__":
    vllm_program.frames.serve(socket.socket(fileno=int(sys.argv[1])), RawVllm())
