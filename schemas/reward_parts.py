"""Names of reward parts, which become columns `reward_<part>` and metrics of the same names."""

import re

RESERVED = ("reward", "failed")  # `reward/failed` counts failed rewards

_NAME = re.compile(r"\w[\w.-]*")


def check_part_name(name: str) -> str:
    """Return the name of a reward part, if it can be that of a column and a metric.

    Raises:
        ValueError: It is empty or reserved, or has other characters than letters and digits of any alphabet, "_", "-"
            and ".".
    """
    if name in RESERVED:
        raise ValueError(f"a part can't be named {name!r}, the name of the whole reward or of its failures; rename it")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a part can't be named {name!a:.80}; use letters, digits, '_', '-' and '.', and begin with none of the "
            "last two"
        )
    return name
