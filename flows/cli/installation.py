"""What is installed: vLLM, and packages that came along with it but don't fit the installed torch.

`python -m flows.cli.installation` names the latter, for `pip uninstall`.
"""

from importlib import import_module
from importlib.util import find_spec

from schemas.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # each is built against one torch, CUDA or CPU


def broken_companions() -> list[str]:
    """The installed packages among `COMPANIONS` that can't be imported; transformers' models then can't be, either."""
    return [name for name in COMPANIONS if find_spec(name) is not None and not _can_import(name)]


def explain_import_error(error: ImportError) -> ConfigError | None:
    """What to do about an import that failed; None where these packages are not to blame."""
    broken = broken_companions()
    if not broken:
        return None
    return ConfigError(
        f"{str(error).split('. ')[0]}: {', '.join(broken)} can't be loaded beside the installed torch; Sluice and "
        f"vLLM's text models don't need them: pip uninstall {' '.join(broken)}"
    )


def _can_import(name: str) -> bool:
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError):  # a library that is missing, or torch's operators that are
        return False
    return True


if __name__ == "__main__":
    print(*broken_companions())
