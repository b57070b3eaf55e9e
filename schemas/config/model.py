"""Which model is trained."""

from schemas.base import Frozen


class ModelConfig(Frozen):
    """A causal language model and its tokenizer, as an ordinary Hugging Face folder."""

    path: str  # local folder, or a hub name where there is a network
