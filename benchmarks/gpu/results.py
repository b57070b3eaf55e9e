"""The settings of the checklist, and what its checks return."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from schemas.base import Frozen

Figure = float | int | str


class Settings(Frozen):
    """What the checks run on.

    On the CPU they are twins of the real ones: the same code with tiny sizes, gloo instead of NCCL, the embedded engine
    instead of vLLM, and without the goals that only a GPU can meet.
    """

    device: Literal["cuda", "cpu"]
    peak_tflops: PositiveFloat  # of the device, dense bfloat16
    rollout_python: str | None = None  # the interpreter with vLLM for CUDA, an absolute path

    @property
    def is_twin(self) -> bool:
        return self.device == "cpu"


class CheckResult(Frozen):
    """The result of one check."""

    name: str
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""  # why it was skipped or failed, in one line
    figures: dict[str, Figure] = Field(default_factory=dict)
    seconds: NonNegativeFloat = 0.0  # with the start of its process

    @classmethod
    def of(cls, name: str, figures: dict[str, Figure], missed: list[str]) -> "CheckResult":
        """Return the result of a check that ran: failed if it missed a goal."""
        return cls(name=name, status="failed" if missed else "passed", reason="; ".join(missed), figures=figures)
