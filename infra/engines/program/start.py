"""Start an engine that is a program: one of the user's here; vLLM, by `infra.engines.vllm.start`, from its hello on."""

import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from infra.engines.base import EngineModel, GenerationRequest, Sampling, generate_all
from infra.engines.program.engine import ProgramEngine
from infra.engines.program.process import CallFailedError, EngineInstallation, EngineProcess, variables_of
from infra.engines.sizes import check_tensor_parallel
from infra.models.load import build_meta_model
from infra.models.lora import adapted_layers, add_adapter, last_parts
from infra.ray.rendezvous import interface_variables
from schemas.config.rollout import ProcessRollout, ProgramRollout, VllmRollout
from schemas.errors import ConfigError, EngineLostError, first_line

LOOPBACK = "127.0.0.1"


def open_program(rollout: ProgramRollout, of: EngineModel) -> ProgramEngine:
    """Start a program of the user's, with the model folder's weights as policy version 0.

    Args:
        rollout: The program, its interpreter, sizes and dtype.
        of: The model.

    Raises:
        ConfigError: The program can't be used, or can't run this model with these sizes.
        WorkerLostError: It was killed.
    """
    check_tensor_parallel(of.config, rollout)
    process, found = start_program(rollout.program, rollout.python, engine_variables(rollout), of.answer_seconds)
    own: dict[str, Any] = {"cache_bytes": rollout.cache_bytes, "settings": rollout.settings}
    if (lora := of.config.published_lora) is not None:
        own["max_lora_rank"] = lora.rank
    return start_engine(process, found, rollout, of, own, eager=found.device == "cpu")


@cache
def find_program(program: str, python: str | None) -> EngineInstallation:
    """Return what a program of the user's says of itself; it is started for that, and ended.

    Raises:
        ConfigError: See `start_program`.
        WorkerLostError: See there.
    """
    process, found = start_program(program, python, variables_of(python))
    process.close()
    return found


def start_program(
    program: str, python: str | None, variables: Mapping[str, str], seconds: float | None = None
) -> tuple[EngineProcess, EngineInstallation]:
    """Start a program of the user's, and return its process and what it says of itself.

    Args:
        program: `rollout.program`.
        python: `rollout.python`; None: this process's.
        variables: Its environment variables.
        seconds: How long a call may take; see `EngineProcess`.

    Raises:
        ConfigError: There is no such file, it can't be run, or speaks another protocol.
        WorkerLostError: It was killed.
    """
    if not Path(program).is_file():
        raise ConfigError(f"rollout.program {program!r} is not a file; set it to the path of your engine's program")
    interpreter = python or sys.executable
    try:
        process = EngineProcess(interpreter, Path(program), variables, program, seconds)
        with process.ended_on_error():
            found = process.hello()
    except OSError as error:
        raise ConfigError(
            f"rollout.python {interpreter!r} can't be run: {error.strerror}; set it to the interpreter of "
            f"rollout.program {program!r}"
        ) from None
    except (CallFailedError, EngineLostError, KeyError) as error:
        reason = f"it answers hello without {error}" if isinstance(error, KeyError) else error
        raise ConfigError(f"rollout.program {program!r} can't be used: {reason}") from None
    process.name = found.engine
    return process, found


def start_engine(
    process: EngineProcess,
    found: EngineInstallation,
    rollout: VllmRollout | ProgramRollout,
    of: EngineModel,
    own: dict[str, Any],
    *,
    eager: bool,
) -> ProgramEngine:
    """Have a program that has said hello load a model, and return the engine over it; if that fails, end it.

    Args:
        process: The program's.
        found: What it said.
        rollout: The engine's sizes and dtype.
        of: The model.
        own: What only this kind of engine gets with `start`.
        eager: Whether nothing is to be compiled.

    Raises:
        ConfigError: The engine can't run this model with these sizes.
        WorkerLostError: It was killed.
    """
    can_sleep = of.sleeps and found.device == "cuda"
    arguments = {
        "model": of.config.path,
        "dtype": rollout.dtype_on(found.device),
        "max_model_len": of.max_tokens,
        "max_num_seqs": rollout.max_num_seqs,
        "gpu_memory_utilization": rollout.gpu_fraction(is_colocated=of.is_colocated),
        "tensor_parallel_size": rollout.tensor_parallel,
        "enable_sleep_mode": can_sleep,
    } | own
    try:
        with process.ended_on_error():
            shapes = build_meta_model(of.config)
            if (lora := of.config.published_lora) is not None:
                add_adapter(shapes, lora)
                arguments |= _adapter_arguments(shapes)
            started = process.start(arguments, eager=eager)
            if lora is not None:
                _check_layers(shapes, started.adapted_layers, process.name)
            engine = ProgramEngine(
                process,
                started,
                shapes,
                keep_prefixes=rollout.prefix_cache == "version",
                can_sleep=can_sleep,
                lora=lora,
                shared_memory=of.shared_memory,
                verifies_buckets=rollout.kind == "vllm",  # a user's program should, too, but may not
            )
            # Only in the first step does vLLM find out what its kernels don't support, and finish its preparations.
            generate_all(engine, [GenerationRequest(np.zeros(1, dtype=np.int64), (0,))], Sampling(1))
    except (CallFailedError, EngineLostError) as error:  # the engine's rejections
        said = str(error) if isinstance(error, EngineLostError) else first_line(error)
        if isinstance(error, CallFailedError):
            said += process.memory_advice(said)
        raise ConfigError(
            f"rollout.kind = {rollout.kind!r}: {found.engine} {found.version} can't run the model {of.config.path} in "
            f"{arguments['dtype']} with sequences of {of.max_tokens} tokens: {said}"
        ) from error
    return engine


def engine_variables(rollout: ProcessRollout) -> dict[str, str]:
    """Return the environment variables of an engine's process."""
    threads = max(1, torch.get_num_threads() // rollout.tensor_parallel)
    return {**variables_of(rollout.python), **interface_variables(LOOPBACK), "OMP_NUM_THREADS": str(threads)}


def _adapter_arguments(shapes: nn.Module) -> dict[str, Any]:
    """Return what an engine gets that computes with the adapters of these layers, of one version at a time."""
    targets = last_parts(adapted_layers(shapes))  # of other layers, vLLM would compute zeros
    return {"enable_lora": True, "max_loras": 1, "lora_target_modules": targets}


def _check_layers(shapes: nn.Module, wrapped: Collection[str], engine: str) -> None:
    """Check that an engine has a place for the adapters of every layer of `shapes`, the adapted transformers model.

    `wrapped` names the engine's layers that have one; a layer may fuse several, as vLLM's do with q, k and v.
    """
    blocks = {name.rpartition(".")[0] for name in wrapped}
    if lacking := [name for name in adapted_layers(shapes) if name.rpartition(".")[0] not in blocks]:
        raise ConfigError(
            f'model.lora.publish = "adapters": {engine} has no adapter for {lacking[0]} of this model; set '
            'model.lora.publish = "merged"'
        )
