"""The texts of single tokens."""

import numpy as np
import pyarrow as pa

from schemas.config.model import ModelConfig


class TokenTexts:
    """Decodes tokens one by one. A token that is part of a character's bytes is a replacement character.

    Args:
        model: The model whose tokenizer is used.

    Raises:
        ModelError: The model's folder or tokenizer isn't there any more.
    """

    def __init__(self, model: ModelConfig) -> None:
        from infra.models.load import load_tokenizer  # imports torch, which few queries need

        self._tokenizer = load_tokenizer(model)
        self._known: dict[int, str] = {}

    def of(self, token_ids: pa.Array) -> pa.Array:
        """Return the text of each token: strings [T]."""
        unique, index = np.unique(token_ids.to_numpy(zero_copy_only=False), return_inverse=True)
        new = [token for token in unique.tolist() if token not in self._known]
        self._known |= zip(new, self._tokenizer.batch_decode([[token] for token in new]), strict=True)
        texts = pa.array([self._known[token] for token in unique.tolist()], pa.string())
        return texts.take(pa.array(index))
