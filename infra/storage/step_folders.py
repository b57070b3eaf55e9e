"""The names of a run's per-step folders: the ledger, the plans and the columns of a step have the same one."""

_PREFIX = "step-"


def step_folder(step: int) -> str:
    """Return the name of a step's folder; names sort by step."""
    return f"{_PREFIX}{step:06d}"


def step_number(folder: str) -> int | None:
    """Return the step that a folder's name stands for; None if it isn't the name of a step's folder."""
    number = folder.removeprefix(_PREFIX)
    return int(number) if folder.startswith(_PREFIX) and number.isdecimal() else None
