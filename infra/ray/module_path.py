"""The module path of a run's processes: the working directory is last, after Sluice's own packages.

It is the driver's, in Ray's workers too, wherever Ray was started: the paths in a config are relative to it.

A reward function may be next to the config, so the working directory is on `sys.path` in the driver, in Ray's workers
and in their child processes. But a `tasks.py` or `schemas.py` in it must not shadow a package of Sluice, nor any other
file a module of Python or of a dependency.
"""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

INSTALLATION = str(Path(__file__).parents[2])  # the folder of Sluice's packages


def append_working_directory(folder: str | None = None) -> None:
    """Move a folder to the end of `sys.path`, or append it.

    If Sluice's own folder isn't on the path, it is put before it: the finder of an editable install is consulted only
    after the whole path. If the two are the same folder, as in a checkout, the path's order is left as it is.

    Args:
        folder: This process's working directory if not given.
    """
    folder = os.path.realpath(folder or os.getcwd())
    is_checkout = folder == INSTALLATION
    others = [entry for entry in sys.path if is_checkout or (entry and os.path.realpath(entry) != folder)]
    last = [entry for entry in dict.fromkeys((INSTALLATION, folder)) if entry not in others]
    sys.path[:] = [*others, *last]


def worker_setup_hook() -> Callable[[], None]:
    """Return a setup hook for Ray's workers: they run in this process's working directory, which is last on their path.

    Before it are the folders that the user has put on this process's path, from which a reward may be imported.

    Ray pickles the hook by value, so that it runs before a worker imports any module of Sluice.
    """
    folder, installation, own = os.getcwd(), INSTALLATION, _own_folders()

    def set_module_path() -> None:
        import os
        import sys
        from contextlib import suppress

        with suppress(OSError):  # another node may lack the folder
            os.chdir(folder)
        sys.path.append(installation)  # for a checkout that isn't installed
        try:
            from infra.ray.module_path import keep_last
        except ImportError:
            return  # Sluice isn't installed on this node; the worker's task raises the same, with its traceback
        finally:
            sys.path.pop()
        keep_last(folder, own)

    return set_module_path


def _own_folders() -> list[str]:
    """Return the folders on this process's path that are neither Python's nor Sluice's, nor the working directory."""
    paths = sysconfig.get_paths()
    python = tuple(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))
    folders = [os.path.abspath(entry) for entry in sys.path if entry and os.path.isdir(entry)]
    others = [folder for folder in folders if folder not in (os.getcwd(), INSTALLATION)]
    return [folder for folder in dict.fromkeys(others) if not os.path.join(folder, "").startswith(python)]


def keep_last(folder: str, own: Sequence[str] = ()) -> None:
    """Move a folder to the end of `sys.path`, after others of the user's, and keep it there.

    Ray puts the driver's working directory first on a worker's path when the worker starts its first task, which is
    after the setup hook. So every import first moves it back.
    """
    append_working_directory(folder)
    is_checkout = os.path.realpath(folder) == INSTALLATION
    end = len(sys.path) - (not is_checkout)
    sys.path[end:end] = [entry for entry in own if entry not in sys.path]  # after Sluice's, which they must not shadow
    if not is_checkout:
        sys.meta_path.insert(0, _FallbackFinder(folder))


class _FallbackFinder(MetaPathFinder):
    """A finder that never finds anything, but is consulted before the one that searches `sys.path`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._folder in sys.path[:-1]:
            append_working_directory(self._folder)
        return None
