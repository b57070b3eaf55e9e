"""The module that scores, and of a policy also trains: sharded over ranks, with this rank's part of the weights."""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh

from infra.models.load import empty_model, empty_policy, num_embeddings, warn_of_unused
from infra.models.weights import load_weights
from rl_core.training import ScoringModule, shard
from rl_core.training.sharding import single_rank_mesh
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig

logger = logging.getLogger(__name__)


def load_scoring_module(
    config: RunConfig,
    model: ModelConfig,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    *,
    trains: bool,
    shares_prompts: bool | None = None,
) -> tuple[ScoringModule, DeviceMesh | None]:
    """Build, shard and load a model, and probe it.

    Args:
        config: The run.
        model: The run's model, or what the reference is of it.
        device: Where this rank computes.
        mesh: The ranks; None: this rank alone.
        trains: Whether it is the policy, with adapters, whose weights are kept in float32; else they are frozen, and
            kept only in the compute dtype.
        shares_prompts: Whether samples share prompts; None: as the config says.

    Returns:
        The module; and the mesh that it is sharded over, of this rank alone if FSDP only makes the copies of weights in
        the compute dtype. None: it is not sharded.

    Raises:
        ModelError: The model can't be loaded, see `empty_model` and `load_weights`; or its routers can't be replayed.
        ConfigError: See `infra.models.lora.add_adapter`.
        ScoringError: Packed sequences would attend to each other under this model.
    """
    empty = empty_policy(model) if trains else empty_model(model).requires_grad_(False)
    replays = trains and config.rollout.router_replay
    packing = config.packing
    module = ScoringModule(
        empty,
        packing if shares_prompts is None else packing.replace(share_prompts=shares_prompts),
        config.rollout.temperature,
        router_replay=replays,
        num_tokens=num_embeddings(config.model),  # a teacher may have more
        may_branch=bool(config.environments),
    )
    compute_dtype = model.dtype_on(device.type)
    if mesh is None and compute_dtype != "float32":
        mesh = single_rank_mesh(device.type)
    if mesh is not None:
        shard(module, empty, mesh, compute_dtype)
    logger.info("computing in %s: model.compute_dtype is %s, on %s", compute_dtype, model.compute_dtype, device.type)
    dtype = torch.float32 if trains else getattr(torch, compute_dtype)
    unused = load_weights(empty, model.path, device, dtype, seed=config.seed)
    if trains:
        warn_of_unused(empty, model.path, unused)
    module.probe()
    return module, mesh
