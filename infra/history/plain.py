"""Values as JSON can hold them."""

import math
from typing import Any


def plain(value: Any) -> Any:
    """Return a value of Python's own types with numbers that are not finite as the texts `NaN` and `±Infinity`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
