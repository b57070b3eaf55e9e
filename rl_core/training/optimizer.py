"""AdamW over the trainable parameters, and the gradient's true global norm."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import AdamW

from rl_core.training.sharding import full_tensor
from schemas.config.optim import OptimConfig


def make_optimizer(module: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW with the config's constants; one fused kernel on CUDA."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients, over all ranks, so that their norm is at most `max_norm`; returns the norm before."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return full_tensor(norm).item()
