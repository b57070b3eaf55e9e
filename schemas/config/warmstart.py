"""A supervised warm start: a few steps of next-token training on answers."""

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from schemas.base import FrozenConfig
from schemas.config.data import DataConfig
from schemas.config.kinds import ImportPath
from schemas.config.model import ModelConfig


class WarmstartConfig(FrozenConfig):
    """Train `model` on the answers of `data` and write the result to `out_path`."""

    model: ModelConfig
    """The model to train."""

    data: DataConfig
    """The prompts and answers."""

    tools: tuple[ImportPath, ...] = ()
    """Import paths of the tools that the chat template shows to the model, as in `environment.tools`."""

    out_path: str
    """Folder to write the trained model to."""

    steps: PositiveInt
    """Number of optimizer steps."""

    num_rows: PositiveInt = 64
    """Rows per step."""

    lr: PositiveFloat = 2e-3
    """Peak learning rate, reached after the warm-up."""

    final_lr_fraction: PositiveFloat = 0.1
    """The learning rate decays linearly to this fraction of `lr`."""

    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up; 0: none."""

    weight_decay: float = 0.01
    """AdamW's decoupled weight decay; 0: none."""

    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""

    seed: NonNegativeInt = 0
    """Seed of the data order."""

    num_threads: NonNegativeInt = 0
    """Torch threads; 0: one per core of the machine."""
