"""Where a Python function or class of the user is imported from."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_PATTERN = r"^[\w.]+:\w+$"


def _is_import_path(path: str) -> str:
    if not re.fullmatch(_PATTERN, path):
        raise ValueError("expected module:name, such as my_env:Game")
    return path


ImportPath = Annotated[str, AfterValidator(_is_import_path), Field(json_schema_extra={"pattern": _PATTERN})]
