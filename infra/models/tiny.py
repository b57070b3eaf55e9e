"""A tiny Qwen3-architecture model with random weights, as a Hugging Face folder, for the demo and the tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 260 tokens: any text round-trips, one token per UTF-8 byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, USER, ASSISTANT, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def make_model(folder: Path, *, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> Path:
    """Write a model (float32, tied embeddings) and its tokenizer to `folder`, and return the folder.

    Args:
        folder: Where to write; created if missing.
        seed: The seed of the weights.
        tokenizer: The tokenizer; None: that of `make_tokenizer`.
        **config: Fields of `Qwen3Config`; at least the sizes.
    """
    tokenizer = tokenizer or make_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**fields, **config}))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
