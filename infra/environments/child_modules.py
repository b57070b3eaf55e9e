"""The modules of an environment process: where they are found, and the class of its environments.

Needs the standard library only, like `infra.environments.child`.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from infra.environments.child_calls import describe


class LoadError(Exception):
    """The class can't be imported, or is none of an environment."""


class PackageFinder(MetaPathFinder):
    """Finds one package by its folder, so that nothing else in the folder around it can be imported.

    Args:
        name: The package.
        folder: Its folder.
    """

    def __init__(self, name: str, folder: str) -> None:
        self._name, self._folder = name, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        file = os.path.join(self._folder, "__init__.py")
        return spec_from_file_location(fullname, file, submodule_search_locations=[self._folder])


def find_modules(module_path: Sequence[str | None], packages: Mapping[str, str]) -> None:
    """Set where modules are found.

    Args:
        module_path: The folders, for `sys.path`; None stands for this interpreter's own.
        packages: Folders of packages by name: the first one is found before others of its name, the rest after them.
    """
    own = sys.path[:]
    sys.path[:] = [folder for entry in module_path for folder in (own if entry is None else [entry])]
    finders = [PackageFinder(name, folder) for name, folder in packages.items()]
    sys.meta_path[:] = [*finders[:1], *sys.meta_path, *finders[1:]]


def load(path: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Return the class at an import path.

    Raises:
        LoadError: It isn't there, or is no class of environments that take these arguments.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a user's module may raise anything
        raise LoadError(
            f"environment.path {path!r}: importing {module_name!r} raised {describe(error)}; "
            "is the module's folder the current one, or on PYTHONPATH, and is what it imports installed for "
            f"{sys.executable}?"
        ) from error
    file = getattr(module, "__file__", None) or module_name
    found = getattr(module, name, None)
    if not isinstance(found, type):
        what = "is not a class" if hasattr(module, name) else "is not there"
        raise LoadError(
            f"environment.path {path!r}: {name!r} {what} in {file}; define `class {name}` there, "
            "with `reset(self)` and `step(self, action)`"
        )
    for method in ("reset(self)", "step(self, action)"):
        if not callable(getattr(found, method.partition("(")[0], None)):
            raise LoadError(f"environment.path {path!r}: class {name} of {file} has no `{method}`; define it")
    try:
        inspect.signature(found).bind({}, 0, **arguments)
    except TypeError as error:
        raise LoadError(
            f"environment.path {path!r}: class {name} of {file} can't be called with (task, seed) and "
            f"environment.arguments {sorted(arguments)}: {error}; change its `__init__(self, task, seed, ...)` or them"
        ) from error
    except ValueError:  # of a class without a signature, such as a compiled one: its first call will show
        pass
    return found
