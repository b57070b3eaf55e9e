"""The time that the driver spends on each part of a step, without what the fake workers do in its process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Meter:
    """The time of the parts of one step: processor time of all threads of this process, and wall-clock time."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, float]] = {}
        self._cpu, self._wall = 0.0, 0.0  # of the workers

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to a part."""
        cpu, wall = self._own_time()
        yield
        cpu_after, wall_after = self._own_time()
        cpu_before, wall_before = self._parts.get(name, (0.0, 0.0))
        self._parts[name] = cpu_before + cpu_after - cpu, wall_before + wall_after - wall

    def exclude(self, cpu: float, wall: float) -> None:
        """Leave out the time since these readings of `time.process_time` and `time.perf_counter`: it is a worker's."""
        self._cpu += time.process_time() - cpu
        self._wall += time.perf_counter() - wall

    def figures(self) -> dict[str, Any]:
        """Return the seconds of all parts together, and of each."""
        return {
            "driver_seconds": round(sum(cpu for cpu, _ in self._parts.values()), 3),
            "wall_seconds": round(sum(wall for _, wall in self._parts.values()), 3),
            "parts": {
                name: {"cpu_seconds": round(cpu, 3), "wall_seconds": round(wall, 3)}
                for name, (cpu, wall) in self._parts.items()
            },
        }

    def _own_time(self) -> tuple[float, float]:
        return time.process_time() - self._cpu, time.perf_counter() - self._wall
