r"""How the rewards read numbers: notations that are alike, and what changes a number's value.

Alike are signs, boxes, fractions, currencies, percent and powers of ten. `3x`, `\sqrt{2}`, `10!` and `3 million` are
other numbers than their digits; units change nothing.
"""

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

# Commands of LaTeX that change no number's value: type, space, brackets, units, and what joins numbers.
_HARMLESS = re.compile(
    "text|textbf|textit|textrm|textsf|textnormal|math(?:rm|bf|it|sf)|mbox|hbox|rm|bf|it|boxed|fbox|underline|"
    "displaystyle|textstyle|left|right|[bB]ig[lr]?|quad|qquad|thinspace|space|"
    "circ|degree|mu|ell|Omega|AA|euro|pounds|yen|in|approx|times|cdot|div"
)
_TEXT = r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?"
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*{_TEXT}\s*\}}\s*\{{\s*{_TEXT}\s*\}}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_EXPONENT = re.compile(r"(?<=\d)[eE][-+]?\d+")
_COMMAND = re.compile(r"\\(?:([A-Za-z]+)|.)", re.DOTALL)
_UNIT = (
    "(?:[mghsdtlLAKNJWVCFHTGBbM]|[khdcmnu]m|in|ft|yd|mi|[kmu]g|lb|oz|ha|ac|[mdckh]?[lL]|hr|[mnu]s|[ap]m|st|nd|rd|th|"
    "[kMG]W|[km]V|[kM]J|k[NA]|mA|Hz|eV|Pa|dB|[kKMGTP]B|cc|ct|pt|qt|gal|min|sec)(?![A-Za-z])"
)
_MULTIPLE = (
    r"hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|halves|tenths?|hundredths?|thousandths?|squared|"
    "cubed|factorial|pi|infinity"
)
_CHANGES = re.compile(
    "|".join(
        (
            r"[√∛∜π∞±∑∏∫¼-¾⅐-⅞↉]",
            r"\d\s*!",
            r"\d\s*[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]",
            r"\d\s*[百千万萬亿億]",
            rf"\d[\s{{(]*(?:(?:and\s+)?an?\s+)?(?:{_MULTIPLE})(?![A-Za-z])",
            r"\b(?:minus|negative|sqrt|root(?:\s+of)?|log|ln|lg|exp|sin|cos|tan)[\s({]*[-+]?[\d.]",
            r"\d[kKM](?![A-Za-z])",  # thousands or millions; "300 K" is a temperature
            rf"\d(?!{_UNIT})[A-Za-z]{{1,2}}(?![A-Za-z])",  # 3x, 2ab
            r"\d[xyz]{3,}(?![A-Za-z])",
            rf"\d[\s{{]+(?!{_UNIT}|[aI]\b)[A-Za-z](?=\s*(?:[-+*/^)\]}}=,$]|\.?\s*\Z))",  # 3 x
            rf"\d\s*/\s*\(?(?!{_UNIT})[A-Za-z](?![A-Za-z])",  # 3/x, but not 5/kg
            r"\d\s*\^\s*[{(]?\s*(?!o)[A-Za-z](?![A-Za-z])",  # 2^x
            r"\d(?:\s+[-+*]\s+|[-+*])\(?[A-Za-z](?![A-Za-z])",  # 3 - x
            r"(?<![A-Za-z])[A-Za-z](?:\s+-\s+|-)\d",  # x - 3, but not GPT-4
            r"[A-Za-z)}](?:\s+[+*/^]\s+|[+*/])\d",  # x/3
            r"[A-Za-z)}]\s*\^\s*\{?\d+\}?\s*[-+*/]\s*\d",  # x^2 + 1
            r"(?<![A-Za-z])[A-Za-z]\(\s*[-+]?\d",  # f(3)
            r"[(\[{]\s*[A-Za-z]\s*,\s*[-+]?\d|\d\s*,\s*[A-Za-z]\s*[)\]}]",  # (3, x)
        )
    )
)


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


def find_change(text: str) -> str | None:
    """Return the first part of a text with a number by which it is another value than the number; None: there is none.

    Args:
        text: An answer without reasoning, as `plain_notation` writes it, with the fractions of numbers as 3/4.
    """
    text = _DEGREES.sub("°", _UNIT_FRACTION.sub(" ", text))
    for match in _COMMAND.finditer(text):
        if match[1] and not _HARMLESS.fullmatch(match[1]):
            return match[0]
    found = _CHANGES.search(_EXPONENT.sub("", _COMMAND.sub(" ", text)))
    return found[0].strip() if found else None
