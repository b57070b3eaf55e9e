"""The text of tokens, as they say it."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

Tokens = list[int] | np.ndarray[Any, Any]


def decode_text(tokenizer: PreTrainedTokenizerBase, token_ids: Tokens, *, skip_special_tokens: bool = False) -> str:
    """Return the text of tokens, without the clean-up of some tokenizers, which makes "x!= y" of "x != y"."""
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return str(text)


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the text of each row of tokens, see `decode_text`."""
    return list(
        tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )
