"""The probe of a load: an engine's log-probs of a known row against the trainer's, under the same weights.

Checksums show that weights arrive as they were sent, but not that an engine computes with them: copies in other
layouts, fused weights or caches may be stale. T tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from infra.engines.base import RolloutEngine
from infra.engines.embedded.engine import TransformersEngine
from infra.engines.sizes import max_model_len
from infra.models.load import num_embeddings
from infra.ray.actors import actor_name
from rl_core.scoring import pack_row
from rl_core.training import ScoringModule
from rl_core.training.sharding import release_gathered
from schemas.config.run import RunConfig
from schemas.errors import StaleWeightsError
from schemas.weights import ProbeRow, WeightsHandle

MAX_TOKENS = 32
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.3}  # mean difference in nats; of two dtypes, the larger

_STALE = (
    "it computes with stale or wrong weights. End the run's workers (sluice stop) and resume it, which starts the "
    "engine again; if it repeats, use another rollout.kind, or weights.probe = false if this model's log-probs "
    "differ that much by rounding"
)
_OTHER_FUNCTION = (
    "its weights are right, as a plain forward with them agrees, but the engine computes another function of this "
    'model. Set rollout.kind = "vllm", or use a model of another family'
)


def probe_tokens(config: RunConfig) -> NDArray[np.int64]:
    """Return the tokens of a run's probe row: int64 [T], drawn from the whole vocabulary, always the same."""
    num_tokens = min(MAX_TOKENS, max_model_len(config) - 1)  # vLLM samples one more
    return np.random.default_rng(0).integers(0, num_embeddings(config.model), num_tokens)


@torch.no_grad()
def score_probe(module: ScoringModule, config: RunConfig, compute_dtype: str) -> ProbeRow:
    """Score the probe row with the trainer's own weights; all ranks must call it."""
    ids = probe_tokens(config)
    tokens, one = torch.from_numpy(ids), torch.ones(1, dtype=torch.int64)
    row = pack_row(tokens[:1], one, tokens[1:], one * (len(ids) - 1))
    logprobs = module(row.to(next(module.parameters()).device)).logprobs.cpu().tolist()
    release_gathered(module)
    return ProbeRow(
        token_ids=tuple(ids.tolist()),
        logprobs=tuple(logprobs),
        temperature=config.rollout.temperature,
        compute_dtype=compute_dtype,
    )


def check_probe(engine: RolloutEngine, handle: WeightsHandle) -> float | None:
    """Compare an engine's log-probs of the probe row with the trainer's: mean absolute difference, nats.

    Raises:
        StaleWeightsError: It is more than rounding explains; the engine has no version any more.
    """
    if (row := handle.probe) is None:
        return None
    found = engine.score(np.array(row.token_ids), row.temperature)
    bound = max(TOLERANCE[engine.dtype], TOLERANCE[row.compute_dtype])
    if not (difference := _difference(found, row)) <= bound:  # also if it is not a number
        engine.version = None
        name = f"{type(engine).__name__} {actor_name()}".rstrip()
        raise StaleWeightsError(
            f"{name} was loaded with version {handle.version} of run {handle.run_id}, "
            f"but its log-probs of {len(found)} known tokens differ from the trainer's by {difference:.3g} nats on "
            f"average, expected at most {bound:g} (engine: {engine.dtype}, trainer: {row.compute_dtype}): "
            + (_OTHER_FUNCTION if _has_weights(engine, row, bound) else _STALE)
        )
    return difference


def _difference(logprobs: NDArray[np.float32], row: ProbeRow) -> float:
    """Return the mean absolute difference from the trainer's log-probs, in nats."""
    return float(np.abs(logprobs.astype(np.float64) - np.array(row.logprobs)).mean())


def _has_weights(engine: RolloutEngine, row: ProbeRow, bound: float) -> bool:
    """Return whether the trainer's log-probs are those of a plain forward with an engine's weights, if it has one."""
    if not isinstance(engine, TransformersEngine):
        return False
    return _difference(engine.score_plainly(np.array(row.token_ids), row.temperature), row) <= bound
