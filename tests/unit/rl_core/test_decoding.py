"""The text of tokens."""

import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_core.rollout.chat import decode_text, decode_texts

PACKAGES = Path(__file__).parents[3]


def test_the_text_is_not_cleaned_up() -> None:
    pieces = [
        ("<unk>", 0.0),
        *((character, -1.0) for character in "abcdxyz!=,.\N{LOWER ONE EIGHTH BLOCK}"),
        ("</s>", 0.0),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=True)
    token_ids = tokenizer("x != y , a . b")["input_ids"]
    assert tokenizer.decode(token_ids) == "x!= y, a. b"
    assert decode_text(tokenizer, token_ids) == "x != y , a . b"
    ended = [*token_ids, tokenizer.eos_token_id]
    assert decode_texts(tokenizer, [ended]) == ["x != y , a . b</s>"]
    assert decode_texts(tokenizer, [ended], skip_special_tokens=True) == ["x != y , a . b"]


def test_nothing_else_decodes_tokens_of_a_model() -> None:
    """Other files use tokenizers' own `Tokenizer` at most, which has no clean-up."""
    calls = re.compile(r"tokenizer\.(?:batch_)?decode\b|\bbatch_decode\b|load_tokenizer\([^)]*\)\.decode")
    found = [
        str(file.relative_to(PACKAGES))
        for package in ("rl_core", "infra", "tasks", "flows")
        for file in sorted((PACKAGES / package).rglob("*.py"))
        if calls.search(file.read_text())
    ]
    assert found == ["rl_core/rollout/chat.py", "flows/report/samples.py"]
