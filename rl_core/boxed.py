r"""Boxes of LaTeX around a final answer: `\boxed{3}` and what is written for it."""

import re
from collections.abc import Iterator

_SIGN = "[-+\N{MINUS SIGN}\N{EN DASH}]"
_BOX = re.compile(
    rf"(?P<sign>(?<![-\w.)\]}}]){_SIGN}|(?:(?<=[=$])|(?<==[ ])){_SIGN}[ ])?"
    r"\\(?:boxed|fbox|framebox)\s*(?:(?P<brace>\{)|(?P<number>-?\d+(?:[.,]\d+)*))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIMPLE = re.compile(r"[\s\d.,$%]*|\\[dt]?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|[a-zA-Z]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete box without surrounding white space, or None.

    Boxes are `\boxed`, `\fbox` and `\framebox`, with or without white space before the brace, and without braces
    around a number. A sign that touches a box, or is between it and "=" or "$", belongs to its content; a bullet or a
    dash before white space doesn't.

    Example:
        >>> last_boxed(r"so -\boxed {3}")
        '-3'
    """
    last = None
    for _, _, content in _boxes(text):
        last = content
    return last


def plain_boxes(text: str) -> str:
    r"""Return the text with all complete boxes as `\boxed{...}`, and their signs in them."""
    parts, at = [], 0
    for start, end, content in _boxes(text):
        if start >= at:  # not in a box itself
            parts += [text[at:start], rf"\boxed{{{content}}}"]
            at = end
    return "".join([*parts, text[at:]])


def _boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and content of each complete box, in order of their starts."""
    closing: dict[int, int] | None = None
    for match in _BOX.finditer(text):
        if match["number"]:
            content, end = match["number"], match.end()
        else:
            closing = _closing_braces(text) if closing is None else closing
            if match.end() not in closing:
                continue
            end = closing[match.end()]
            content = text[match.end() : end - 1].strip()
        if (match["sign"] or "+").strip() != "+":
            content = f"-{content}" if _SIMPLE.fullmatch(content) else f"-({content})"
        yield match.start(), end, content


def _closing_braces(text: str) -> dict[int, int]:
    r"""Return the ends of braces that are closed, by where what is in them begins. `\{` and `\}` don't count."""
    open_braces: list[int] = []
    ends: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(match.end())
        elif match[0] == "}" and open_braces:
            ends[open_braces.pop()] = match.end()
    return ends
