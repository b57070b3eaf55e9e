"""Rollout engines: their protocol, the embedded transformers engine, programs in interpreters of their own, and vLLM.

`infra.engines.open.open_engine` starts the engine of a config. It is not imported here, because it brings in torch and
transformers, which the command line doesn't need to ask whether vLLM is installed.
"""

from infra.engines.base import Generation, GenerationRequest, RolloutEngine, Sampling, TokenExperts

__all__ = ["Generation", "GenerationRequest", "RolloutEngine", "Sampling", "TokenExperts"]
