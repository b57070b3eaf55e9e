"""Token ids of chats whose texts contain a control token's name: in a text it is text, not the control token.

A tokenizer takes `<|end|>` for the control token wherever it stands, so that a prompt could end its own turn and begin
one of another role.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]  # of each: texts `role` and `content`; perhaps `tool_calls`, `name`, ...

_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))


class ControlTokens:
    """The control tokens of a tokenizer, such as `<|end|>`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._names = sorted(filter(None, self._ids), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, self._names))})")

    def find(self, value: Any) -> str | None:
        """Return the first name of a control token in the texts of a chat, or of another JSON value."""
        texts = _texts(value) if self._names else ()
        return next((found[0] for text in texts if (found := self._pattern.search(text))), None)

    def encode(self, messages: Messages, render: Callable[[Messages], str]) -> list[int]:
        """Return the token ids of a chat, in which only the template's control tokens are such.

        Raises:
            ValueError: That can't be done with these texts, or with this tokenizer.
        """
        mark = _unused_character(messages)  # around the number of a name that the template must not see
        plain = render(_replace(messages, lambda text: self._pattern.sub("", text)))
        if self._encode(plain, mark) != self._tokenizer(plain, add_special_tokens=False)["input_ids"]:
            raise ValueError("the tokenizer does not encode the texts between control tokens one by one")
        hidden = _replace(
            messages,
            lambda text: self._pattern.sub(lambda found: f"{mark}{self._names.index(found[0])}{mark}", text),
        )
        return self._encode(render(hidden), mark)

    def _encode(self, text: str, mark: str) -> list[int]:
        """Encode a rendered chat part by part."""
        token_ids: list[int] = []
        hidden = re.compile(f"{mark}([0-9]+){mark}")
        for part in self._pattern.split(text):
            if part in self._ids:
                token_ids.append(self._ids[part])
            elif part:
                clear = hidden.sub(lambda found: self._names[int(found[1])], part)
                token_ids += self._tokenizer(clear, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return token_ids


def _unused_character(messages: Messages) -> str:
    """Return a character of private use that is in no text of a chat."""
    used = set[str]().union(*_texts(messages))
    unused = next((character for character in map(chr, _PRIVATE_USE) if character not in used), None)
    if unused is None:
        raise ValueError("it has all characters of private use, too")
    return unused


def _replace(messages: Messages, change: Callable[[str], str]) -> Messages:
    return [
        {key: value if key == "role" else _change_texts(value, change) for key, value in message.items()}
        for message in messages
    ]


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with other texts, those of the keys of objects, too."""
    if isinstance(value, dict):
        return {change(key): _change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_change_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, and the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value:
            yield from _texts(item)
        if isinstance(value, dict):
            yield from _texts(list(value.values()))
