"""Generate single turns with any engine."""

from collections.abc import Iterator, Sequence
from contextlib import closing

from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling


def generate(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling
) -> Iterator[tuple[int, Generation]]:
    """Yield each sample with its number as soon as it is finished.

    Samples are numbered request by request, in the order of their seeds. Nothing is computed until the next sample is
    requested; if the caller closes the iterator, what is unfinished is dropped.

    Raises:
        EngineLostError: A process of the engine died; it has closed.
        NonFiniteError: The model's logits are not finite.
        ValueError: A prompt is empty or too long, or the engine can't sample so.
        VersionError: The engine is asleep, or has no weights.
    """
    with closing(engine.open_rows(sampling)) as rows:
        rows.begin(requests)
        while rows.num_unfinished:
            yield from rows.step()


def generate_all(engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Generation]:
    """Return the samples of all requests: request by request, in the order of each request's seeds."""
    return [generation for _, generation in sorted(generate(engine, requests, sampling), key=lambda item: item[0])]
