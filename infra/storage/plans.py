"""The step plans that a run keeps for as long as it keeps the steps' columns."""

from pathlib import Path

from infra.storage.atomic import write_atomic
from infra.storage.step_folders import step_folder
from schemas.plan import StepPlan


class PlanFiles:
    """One JSON file per step.

    Args:
        folder: Where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, plan: StepPlan) -> None:
        """Save a step's plan, replacing an earlier one."""
        self._folder.mkdir(exist_ok=True)
        write_atomic(self._path(step), plan.model_dump_json())

    def load(self, step: int) -> StepPlan | None:
        """Return a step's plan; None before it was made, and after its columns were cleared."""
        path = self._path(step)
        return StepPlan.model_validate_json(path.read_text()) if path.exists() else None

    def drop(self, step: int) -> None:
        """Delete a step's plan, if there is one."""
        self._path(step).unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step_folder(step)}.json"
