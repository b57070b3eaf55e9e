"""The texts of single tokens."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from schemas.config.model import ModelConfig


class TokenTexts:
    """Decodes tokens one by one. A token that is part of a character's bytes is a replacement character.

    Args:
        model: The model whose tokenizer is used.

    Raises:
        ModelError: The model's folder or tokenizer isn't there any more.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._decode = _decoder(model)
        self._known: dict[int, str] = {}

    def of(self, token_ids: pa.Array) -> pa.Array:
        """Return the text of each token: strings [T]."""
        unique, index = np.unique(token_ids.to_numpy(zero_copy_only=False), return_inverse=True)
        new = [token for token in unique.tolist() if token not in self._known]
        self._known |= zip(new, self._decode([[token] for token in new]), strict=True)
        texts = pa.array([self._known[token] for token in unique.tolist()], pa.string())
        return texts.take(pa.array(index))


def _decoder(model: ModelConfig) -> Callable[[list[list[int]]], list[str]]:
    file = Path(model.path) / "tokenizer.json"
    if file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        return lambda sequences: tokenizer.decode_batch(sequences, skip_special_tokens=False)
    from infra.models.load import load_tokenizer  # imports torch: seconds
    from rl_core.rollout.decoding import decode_texts

    return partial(decode_texts, load_tokenizer(model))
