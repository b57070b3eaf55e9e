"""The step plans that a run keeps for as long as it keeps the steps' columns."""

from pydantic import ValidationError

from infra.storage.folder import Folder
from infra.storage.step_folders import step_folder
from schemas.errors import RunError
from schemas.plan import StepPlan


class PlanFiles:
    """One JSON file per step.

    plans/step-000007.json

    Args:
        folder: The run's directory.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def save(self, step: int, plan: StepPlan) -> None:
        """Save a step's plan, replacing an earlier one."""
        self._folder.write(_name(step), plan.model_dump_json().encode())

    def load(self, step: int) -> StepPlan | None:
        """Return a step's plan; None before it was made, and after its columns were cleared.

        Raises:
            RunError: The file is not a plan of this version.
        """
        content = self._folder.read(_name(step))
        try:
            return StepPlan.model_validate_json(content) if content is not None else None
        except ValidationError as error:
            raise RunError(
                f"{self._folder.place}/{_name(step)} is damaged, or of an older version of Sluice: "
                f"{error.errors()[0]['msg']}; read it with that version, or remove it"
            ) from None

    def drop(self, step: int) -> None:
        """Delete a step's plan, if there is one."""
        self._folder.remove(_name(step))


def _name(step: int) -> str:
    return f"plans/{step_folder(step)}.json"
