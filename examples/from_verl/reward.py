"""verl's reward function under Sluice's interface."""

from typing import Any

from verl_reward import compute_score


def score(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
    """Call `compute_score` as verl does, and name its score `reward`, as Sluice does."""
    result = compute_score(info["data_source"], completion, answer, info)
    parts = dict(result) if isinstance(result, dict) else {"score": result}
    return {"reward": float(parts.pop("score")), **{name: float(value) for name, value in parts.items()}}
