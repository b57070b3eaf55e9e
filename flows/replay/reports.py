"""What a replay reports of each step."""

from infra.history.diff import Closeness, StageDiff, UpdateChange, worst
from infra.history.moves import TokenMove
from schemas.base import Frozen


class StepReplay(Frozen):
    """A step that was computed again with the run's own settings, and compared with what the run stored."""

    step: int
    stages: tuple[StageDiff, ...]  # all that were compared, in order; A is the run, B the replay

    @property
    def closeness(self) -> Closeness:
        """The least close of its stages."""
        return worst([stage.closeness for stage in self.stages])


class AdvantageChange(Frozen):
    """How advantages changed, of the N rows that both trained on."""

    num_rows: int
    num_changed: int
    largest: float  # of the absolute differences
    mean: float  # of the absolute differences, over the N rows
    num_left_out: int = 0  # rows whose reward failed in one of the two only


class StepChange(Frozen):
    """A step that was computed again with other settings: what changes against what the run did."""

    step: int
    is_off_policy: bool  # its rows were sampled by other weights than those that the replay updates
    update: UpdateChange  # A is the run's, B the replay's
    advantages: AdvantageChange
    metrics: dict[str, tuple[float | None, float]]  # of the run and the replay, where they differ
    moves: tuple[TokenMove, ...]
