"""Whole policies on the CPU; workers load theirs by `infra.models.scoring`."""

import torch
from transformers import PreTrainedModel

from infra.models.load import empty_policy
from infra.models.weights import load_weights
from schemas.config.model import ModelConfig


def load_policy(config: ModelConfig, seed: int = 0) -> PreTrainedModel:
    """Load the model to train, with starting weights in float32 and new adapters of this seed."""
    model = empty_policy(config)
    load_weights(model, config.path, torch.device("cpu"), seed=seed)
    return model
