"""What it costs that vLLM is a program of its own: Sluice's engine next to vLLM within one process, in turns.

`python -m tests.support.engine_side_by_side 9`, with `ENGINE_PYTHON` naming an interpreter with vLLM, has both sample
32 rows of 128 tokens, and load new weights, so many times in turns: the same model of 25 million parameters, prompts,
seeds and environment variables. It checks that all samples are the same, bit for bit, and prints a line of JSON: of
tokens per second, and of the seconds of a load, the medians, the ratio (Sluice's to the other's) of each pair, and the
median ratio. `load` compares with tensors that are in vLLM's process already; `load_mapped` with what a worker has to
do if vLLM is in its own process: it maps the trainer's file, computes the checksum and loads.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from infra.engines.base import EngineModel, GenerationRequest, Sampling, WeightsBucket, generate_all
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import EngineProcess, StartedEngine
from infra.engines.vllm.start import open_vllm
from infra.models.flat_tensors import assign_slots, tensor_specs
from infra.models.load import load_model
from infra.storage.shared_memory import SharedFolder, choose_root
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmRollout
from tests.support.engine_checks import ENGINE_PYTHON
from tests.support.tiny import make_tiny_model
from tests.support.weight_tensors import bucket_of

RAW = Path(__file__).with_name("raw_vllm.py")
NUM_ROWS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 32, 32, 128, 260
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.02,
}


class SideBySide:
    """Both engines, of the same model; each rests while the other works.

    Args:
        engine: Sluice's.
        raw: The process of `tests.support.raw_vllm`, which has started vLLM.
        buckets: Each version's weights, as one bucket in a file.
        max_tokens: The tokens of a row's response.
    """

    def __init__(
        self, engine: ProgramEngine, raw: EngineProcess, buckets: Sequence[WeightsBucket], max_tokens: int
    ) -> None:
        self._engine, self._raw, self._buckets, self._max_tokens = engine, raw, buckets, max_tokens
        self._weights = list[dict[str, Any]]()
        generator = np.random.default_rng(0)
        self._prompts = generator.integers(VOCABULARY, size=(NUM_ROWS, PROMPT_TOKENS), dtype=np.int32)
        for version, bucket in enumerate(buckets):
            slots = assign_slots(tensor_specs(bucket.tensors))
            tensors = [(slot.spec.name, slot.spec.dtype, slot.spec.shape, slot.offset) for slot in slots]
            self._weights.append({"version": version, "path": str(bucket.file), "tensors": tensors})
            raw.call("hold", self._weights[-1])

    def load(self, version: int) -> dict[str, float]:
        """Load a version into both; return the seconds that it took."""
        bucket = self._buckets[version]
        began = time.perf_counter()
        self._engine.load_weights(tensor_specs(bucket.tensors), [bucket], version)
        seconds = time.perf_counter() - began
        raw, _ = self._raw.call("reload", self._weights[version])
        return {"load": seconds, "raw_load": raw["seconds"], "raw_load_mapped": raw["mapped_seconds"]}

    def generate(self, seed: int) -> dict[str, float]:
        """Sample a response for each prompt with both; check that they are the same, and return the seconds."""
        seeds = range(seed, seed + NUM_ROWS)
        requests = [GenerationRequest(prompt, (each,)) for prompt, each in zip(self._prompts, seeds, strict=True)]
        began = time.perf_counter()
        found = generate_all(self._engine, requests, Sampling(self._max_tokens))
        seconds = time.perf_counter() - began
        arguments = {"seeds": list(seeds), "max_tokens": self._max_tokens}
        raw, buffers = self._raw.call("generate", arguments, list(self._prompts))
        expected = [each.token_ids.tobytes() for each in found] + [each.logprobs.tobytes() for each in found]
        assert list(map(bytes, buffers)) == expected, "the two engines sampled different responses"
        return {"generate": seconds, "raw_generate": raw["seconds"]}


def measure(num_pairs: int, max_tokens: int = NEW_TOKENS, sizes: Mapping[str, Any] = SIZES) -> dict[str, Any]:
    """Generate and load with both so many times, in turns, after one that doesn't count; see this module."""
    with tempfile.TemporaryDirectory() as folder, open_both(Path(folder), max_tokens, sizes) as both:
        pairs = [both.load(turn % 2) | both.generate(1000 * turn) for turn in range(num_pairs + 1)][1:]
    medians = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    ratios = {
        "tokens_per_second": [pair["raw_generate"] / pair["generate"] for pair in pairs],
        "load": [pair["load"] / pair["raw_load"] for pair in pairs],
        "load_mapped": [pair["load"] / pair["raw_load_mapped"] for pair in pairs],
    }
    num_tokens = NUM_ROWS * max_tokens
    return {
        "tokens_per_second": {name: num_tokens / medians[name] for name in ("generate", "raw_generate")},
        "load_seconds": {name: medians[name] for name in ("load", "raw_load", "raw_load_mapped")},
        "median_ratios": {name: statistics.median(found) for name, found in ratios.items()},
        "ratios": {name: sorted(found) for name, found in ratios.items()},
    }


@contextmanager
def open_both(folder: Path, max_tokens: int, sizes: Mapping[str, Any]) -> Iterator[SideBySide]:
    """Start both with the same model, arguments of vLLM and environment variables, and provide them."""
    path = make_tiny_model(folder / "model", **sizes)
    other = make_tiny_model(folder / "other", seed=1, **sizes)
    states = [dict(load_model(ModelConfig(path=str(each))).named_parameters()) for each in (path, other)]
    shared = SharedFolder(choose_root(None, 3 * sum(each.nbytes for each in states[0].values())), "side")
    buckets = [bucket_of(state, shared.path / str(version)) for version, state in enumerate(states)]
    asked, start = list[tuple[Mapping[str, Any], bool]](), EngineProcess.start

    def noted(process: EngineProcess, arguments: Mapping[str, Any], *, eager: bool) -> StartedEngine:
        asked.append((arguments, eager))
        return start(process, arguments, eager=eager)

    rollout = VllmRollout(python=ENGINE_PYTHON, cache_bytes=2**28)
    try:
        with patch.object(EngineProcess, "start", noted):
            engine = open_vllm(rollout, EngineModel(ModelConfig(path=str(path)), PROMPT_TOKENS + max_tokens))
        with closing(engine):
            variables = psutil.Process(engine.processes[0]).environ()
            with closing(EngineProcess(ENGINE_PYTHON, RAW, variables, "raw", 600)) as raw:
                ((arguments, eager),) = asked
                raw.start(arguments, eager=eager)
                yield SideBySide(engine, raw, buckets, max_tokens)
    finally:
        shared.remove()


if __name__ == "__main__":
    measured = measure(*map(int, sys.argv[1:] or ["5"]))
    rounded = json.loads(json.dumps(measured), parse_float=lambda text: round(float(text), 4))
    print(json.dumps(rounded | {"load_average": os.getloadavg()}))
