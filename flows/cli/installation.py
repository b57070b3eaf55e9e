"""Packages that were installed together with vLLM but don't match the installed torch.

`python -m flows.cli.installation` prints their names, for `pip uninstall`.
"""

from importlib import import_module
from importlib.util import find_spec

from schemas.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")  # each is built against one torch, CUDA or CPU


def broken_companions() -> list[str]:
    """Return the installed packages of `COMPANIONS` that fail to import; transformers' models then fail, too."""
    return [name for name in COMPANIONS if find_spec(name) is not None and not _can_import(name)]


def explain_import_error(error: ImportError) -> ConfigError | None:
    """Return an error that says how to fix a failed import; None if these packages did not cause it."""
    broken = broken_companions()
    if not broken:
        return None
    return ConfigError(
        f"{str(error).split('. ')[0]}: {', '.join(broken)} can't be loaded with the installed torch; Sluice and "
        f"vLLM's text models don't need them: pip uninstall {' '.join(broken)}"
    )


def _can_import(name: str) -> bool:
    try:
        import_module(name)
    except (ImportError, OSError, RuntimeError):  # a shared library or an operator of torch is missing
        return False
    return True


if __name__ == "__main__":
    print(*broken_companions())
