"""The phases of a step: what the step waits for, one after another."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schemas.step import Span


class PhaseTimer:
    """A timer of wall-clock seconds by phase, and of when each phase ran."""

    def __init__(self) -> None:
        self.started, self.started_at = time.perf_counter(), time.time()
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self._add_span(phase, start).seconds

    def background(self, name: str) -> Callable[[object], object]:
        """Return what is to be called when work that overlaps the phases, and begins now, is done."""
        start = time.perf_counter()
        return lambda _: self._add_span(name, start)

    def _add_span(self, name: str, start: float) -> Span:
        span = Span(name=name, start=start - self.started, seconds=time.perf_counter() - start)
        self.spans.append(span)
        return span
