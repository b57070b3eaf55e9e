"""What is reported of trajectories."""

from collections import Counter
from collections.abc import Sequence

from infra.environments.trajectory import Trajectory
from schemas.metrics import Max, Mean, Metrics, Sum


def describe(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the metrics of trajectories that depend on nothing but their tokens and environments."""
    if not trajectories:
        return {}
    count = len(trajectories)
    bridges = sum(int((~trajectory.loss_mask).sum()) for trajectory in trajectories)
    ends = Counter(trajectory.end for trajectory in trajectories)
    own = Counter[str]()
    for trajectory in trajectories:
        own.update(trajectory.metrics)
    return {
        "turns": Mean(total=sum(len(trajectory.turns) for trajectory in trajectories), weight=count),
        "turns/environment_tokens": Mean(total=bridges, weight=count),
        "turns/failed": Sum(value=ends["failed"]),
        **{f"turns/ended_{end}": Mean(total=ends[end], weight=count) for end in ends},
        **{f"environment/{name}": Mean(total=total, weight=count) for name, total in own.items()},
    }


def measure(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the seconds that the environments took, and what the journal spared them, if it did."""
    if not trajectories:
        return {}
    seconds = [trajectory.environment_seconds for trajectory in trajectories]
    replayed = {
        "turns/recorded": sum(trajectory.num_recorded for trajectory in trajectories),
        "turns/played_anew": sum(trajectory.is_anew for trajectory in trajectories),
    }
    return {
        "turns/environment_seconds": Mean(total=sum(seconds), weight=len(seconds)),
        "turns/environment_seconds_max": Max(value=max(seconds)),
        **{name: Sum(value=count) for name, count in replayed.items() if count},
    }
