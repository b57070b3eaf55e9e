"""Checks that all engines make."""

from collections.abc import Sequence

from infra.engines.base import GenerationRequest, RolloutEngine, Sampling
from schemas.errors import VersionError, WeightsError


def require_awake(engine: RolloutEngine) -> None:
    """Check that an engine can generate.

    Raises:
        VersionError: It is asleep, or has no weights.
    """
    if engine.asleep:
        parts = " and ".join(sorted(engine.asleep))
        raise VersionError(f"the engine is asleep ({parts} released): wake it and publish weights first")
    if engine.version is None:
        raise VersionError("the engine has no weights: publish some first")


def check_prompts(requests: Sequence[GenerationRequest], sampling: Sampling, max_tokens: int | None = None) -> None:
    """Check that an engine can take all requests.

    Args:
        requests: The requests.
        sampling: How many tokens they may get.
        max_tokens: The most tokens of prompt and response; None: any number.

    Raises:
        ValueError: A prompt is empty or too long.
    """
    for index, request in enumerate(requests):
        length, limit = len(request.prompt_ids), request.token_limit(sampling)
        if length == 0:
            raise ValueError(f"request {index} has an empty prompt; a model needs at least one token to continue")
        if max_tokens is not None and length > max_tokens - limit:
            raise ValueError(
                f"request {index} has a prompt of {length} tokens, but with {limit} response tokens the engine accepts "
                f"prompts of at most {max_tokens - limit}"
            )


def check_held(version: int | None, *, is_complete: bool) -> None:
    """Check that an engine that keeps some of its weights has a version.

    Raises:
        WeightsError: It has none.
    """
    if version is None and not is_complete:
        raise WeightsError("an engine without a version was sent changed weights only; publish all of them to it")
