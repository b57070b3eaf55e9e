"""AdamW over the trainable parameters, and gradient clipping by the global norm over all ranks."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import AdamW

from rl_core.training.sharding import full_tensor
from schemas.config.optim import OptimConfig


def make_optimizer(module: nn.Module, config: OptimConfig) -> AdamW:
    """Create AdamW with the config's constants; on CUDA, the fused kernel."""
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
    """Clip the gradients' global norm, over all ranks, to `max_norm`; return the norm before clipping."""
    norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm)
    return full_tensor(norm).item()
