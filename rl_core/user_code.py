"""Code of users: functions named by import paths in configs, and their errors."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from schemas.errors import UserError

MAX_ERROR_CHARACTERS = 1000  # of an error's description, which is logged or shown to a model


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
    try:
        return import_module(module_name), name
    except Exception as error:  # importing a user's module may raise anything
        raise error_class(
            f"{key} {path!r}: importing {module_name!r} raised {type(error).__name__}: {error}; "
            "is the module's folder the current one, or on PYTHONPATH?"
        ) from error


def hidden_file(module: ModuleType) -> Path | None:
    """Return the file in the current folder that a module of the same name hides, such as Python's `code`, or None."""
    own = Path.cwd() / f"{module.__name__.replace('.', '/')}.py"
    is_loaded = module.__file__ is not None and own == Path(module.__file__).absolute()
    return own if own.exists() and not is_loaded else None


def describe_error(error: BaseException) -> str:
    """Return an error's type and message, in at most `MAX_ERROR_CHARACTERS` that can be UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception may raise anything
        text = f"{type(error).__name__}, whose message can't be formatted"
    return text.encode(errors="replace").decode()[:MAX_ERROR_CHARACTERS]
