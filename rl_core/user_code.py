"""Code of users: functions named by import paths in configs, their errors, and event loops of their own."""

import asyncio
import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from schemas.errors import UserError

MAX_ERROR_CHARACTERS = 1000  # of an error's description, which is logged or shown to a model


_importing: list[str] = []


def imported_now() -> str | None:
    """Return the user's module that this process is importing; None if there is none."""
    return _importing[-1] if _importing else None


def import_user_module(key: str, path: str, error_class: type[UserError]) -> tuple[ModuleType, str]:
    """Import the module of an import path `module:name`; return it with the name.

    Args:
        key: The config's key that has the path.
        path: The import path.
        error_class: What to raise.

    Raises:
        UserError: Of that class; importing the module raised an error.
    """
    module_name, _, name = path.partition(":")
    _importing.append(module_name)
    try:
        module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing a user's module may raise anything
        raise error_class(
            f"{key} {path!r}: importing {module_name!r} raised {' '.join(describe_error(error).split())}"
            f"{_import_advice(error)}"
        ) from error
    finally:
        _importing.pop()
    if shadowed := _shadowed_file(module):
        imported = getattr(module, "__file__", None) or "a module of Python"
        raise error_class(
            f"{key} {path!r}: {module_name!r} is {imported}, not {shadowed}, as that comes first on the module path; "
            "give your file another name"
        )
    return module, name


def _import_advice(error: BaseException) -> str:
    if isinstance(error, UserError):
        return ""  # it has its own
    if isinstance(error, SystemExit):
        return '; put what is to run as a program under `if __name__ == "__main__":`'
    return "; is the module's folder the current one, or on PYTHONPATH?"


def _shadowed_file(module: ModuleType) -> Path | None:
    """Return the file of the current folder that has a module's name but is not it, if there is one."""
    here = Path.cwd().joinpath(*module.__name__.split("."))
    folders = [Path(file).resolve().parent for file in [getattr(module, "__file__", None)] if file]
    for file in (here / "__init__.py", here.with_name(f"{here.name}.py")):
        if file.is_file() and file.resolve().parent not in folders:
            return file
    return None


_own_loops = threading.local()


@contextmanager
def outside_of_loop() -> Iterator[None]:
    """Run plain code in a coroutine as if no event loop were running, so that it may run one of its own.

    The public way, another thread, is none for users' code: there it can set no signal handler, such as that of a time
    limit.
    """
    running = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(running)


@contextmanager
def in_own_loop() -> Iterator[None]:
    """Run plain code `outside_of_loop`, where `asyncio.get_event_loop` returns a loop of this thread's own."""
    running = asyncio.get_running_loop()
    own: asyncio.AbstractEventLoop | None = getattr(_own_loops, "loop", None)
    if own is None or own.is_closed():
        own = _own_loops.loop = asyncio.new_event_loop()
        atexit.register(own.close)
    with outside_of_loop():
        asyncio.set_event_loop(own)
        try:
            yield
        finally:
            asyncio.set_event_loop(running)


def describe_error(error: BaseException) -> str:
    """Return an error's type and message, in at most `MAX_ERROR_CHARACTERS` that can be UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception may raise anything
        text = f"{type(error).__name__}, whose message can't be formatted"
    return text.encode(errors="replace").decode()[:MAX_ERROR_CHARACTERS]
