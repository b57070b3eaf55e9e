r"""Notations of numbers that the rewards read alike: signs, boxes, fractions, currencies, percent, powers of ten."""

import re

from rl_core.boxed import plain_boxes

_DASHES = dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}﹣－"), "-")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUBSTITUTIONS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\{,\}|\\?,\\!|\\,(?=\d{3}))(?=\d)", ","),  # LaTeX's marks of thousands
        (r"(\\\$|[€£¥₹])\s*(?=[-+]?[\d.])", ""),
        (r"(?:(?<![-\w.)\]}])([-+])|(?<==)\s?([-+])[ ])\$\s?(?=\.?\d)", r"$\1\2"),  # -$5, but not the bullet in "- $5"
        (r"(?<=[\d}])\s*(?:\\?%(?!\s*\d)|(?:percent|percentage|pct)\b)", ""),
        (r"(?<![\d./\w])(\d{1,3})\s*\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1 \2/\3"),
        (r"=[^\S\n]*-[^\S\n]+(?=[\d.])", "= -"),
    )
]
_MIXED = re.compile(r"(?<![\d./\w])(\d{1,3}) (\d+)/(\d+)(?![\d/])")  # 1 1/2
_POWER = re.compile(
    r"(?<![\w./^_])(?<![/^]\s)(\d+(?:,\d{3})*(?:\.\d+)?)\s*(?:[x×*·]|\\times|\\cdot)\s*10\s*"
    r"(?:\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))|([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))(?!\.?\w|[\^!])"
)

_POWER_ALONE = re.compile(r"(?<![\w.^_}])10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))(?!\.?\w|[\^!])")


def plain_notation(text: str) -> str:
    r"""Return the text with numbers written plainly.

    All dashes are "-", boxes are `\boxed{...}` with their signs, marks of thousands are commas, and mixed numbers are
    fractions. Currencies and percent signs are units, and left out; `3 \times 10^5` becomes `3e5`.
    """
    text = plain_boxes(text.translate(_DASHES))
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    text = _MIXED.sub(_improper, text)
    return _POWER_ALONE.sub(lambda found: f"1e{found[1] or found[2]}", _POWER.sub(_scientific, text))


def _improper(found: re.Match[str]) -> str:
    whole, numerator, denominator = map(int, found.groups())
    if numerator >= denominator:  # two numbers
        return found[0]
    return f"{whole * denominator + numerator}/{denominator}"


def _scientific(found: re.Match[str]) -> str:
    mantissa, *exponents = found.groups()
    return f"{mantissa}e{next(filter(None, exponents)).translate(_SUPERSCRIPTS)}"
