"""vLLM in a child process that generates on request."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.rollout.workload import Workload
from schemas.errors import ConfigError, PipelineError

Responses = list[tuple[np.ndarray, np.ndarray]]  # token ids and log-probs
CACHE_BYTES = 2**31
JOIN_SECONDS = 30


class VllmProcess:
    """A child process that holds a `VllmEngine`."""

    def __init__(self, folder: Path, max_tokens: int, max_rows: int, num_threads: int) -> None:
        """Start the process and wait until its engine is ready.

        Raises:
            ConfigError: vLLM isn't installed, or can't run this model.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_connection, folder, max_tokens, max_rows, num_threads), daemon=True
        )
        self._process.start()
        child_connection.close()
        if (message := self._receive()) is not None:
            self._process.join(JOIN_SECONDS)
            raise ConfigError(message)

    def generate(self, workload: Workload, repetition: int) -> tuple[Responses, float]:
        """Return the responses, and the seconds that generating them took in the child."""
        self._connection.send((workload, repetition))
        return self._receive()

    def close(self) -> None:
        """Stop the child process."""
        self._connection.close()
        self._process.join(JOIN_SECONDS)

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except EOFError:
            raise ConfigError("vLLM's process exited; see its output above") from None


def _serve(connection: Connection, folder: Path, max_tokens: int, max_rows: int, num_threads: int) -> None:
    """Open an engine, send None or the error, then generate workloads until the connection is closed."""
    import torch

    from infra.engines.base import generate_all
    from infra.engines.vllm.start import open_vllm
    from schemas.config.model import ModelConfig
    from schemas.config.rollout import VllmRollout

    torch.set_num_threads(num_threads)
    try:
        rollout = VllmRollout(cache_bytes=CACHE_BYTES, max_num_seqs=max_rows)
        engine = open_vllm(ModelConfig(path=str(folder)), rollout, max_tokens)
    except PipelineError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            workload, repetition = connection.recv()
        except EOFError:
            break
        start = time.perf_counter()
        generations = generate_all(engine, workload.requests(repetition), workload.sampling)
        seconds = time.perf_counter() - start
        connection.send(([(generation.token_ids, generation.logprobs) for generation in generations], seconds))
    engine.close()
