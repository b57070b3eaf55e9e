"""The entry point of the `sluice` command, with its error messages and exit codes."""

from typing import NoReturn

from rich.console import Console

from flows.cli import history_commands, replay_commands, service_commands  # noqa: F401  they add their commands
from flows.cli.commands import app
from flows.lifecycle.exit import exit_process
from infra.processes import infrequent_gc
from infra.ray.module_path import append_working_directory
from schemas.errors import PipelineError, UserError, describe

USER_ERROR, PIPELINE_ERROR = 2, 1
SERVICES = ("httpx", "prefect", "ray", "torch")  # the modules of the errors of services and devices

errors = Console(stderr=True)


def main() -> NoReturn:
    """Run the command; print a one-line message for an error that the user can fix, or that stopped a run."""
    append_working_directory()  # a reward function may be next to the config
    exit_process(_run_command())


def _run_command() -> int:
    """Run the command; return its exit code."""
    try:
        with infrequent_gc():  # most commands import a lot
            app(prog_name="sluice")  # ends in SystemExit
        return 0
    except SystemExit as ended:
        return int(ended.code or 0)
    except UserError as error:
        return _report("error", str(error), error, USER_ERROR)
    except PipelineError as error:
        return _report("stopped", f"{type(error).__name__}: {error}", error, PIPELINE_ERROR)
    except Exception as error:
        if (settings := _explain_settings(error)) is not None:
            return _report("error", settings, error, USER_ERROR)
        if not _is_expected(error):
            raise
        return _report("stopped", describe(error), error, PIPELINE_ERROR)


def _explain_settings(error: Exception) -> str | None:
    """Return which of its settings Prefect refused when it was imported; None if the error is another one."""
    from pydantic import ValidationError  # not at the top: `sluice --help` doesn't need it

    if not isinstance(error, ValidationError) or not error.title.endswith("Settings"):
        return None
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return (
        f"Prefect refuses its settings: {place}{': ' if place else ''}{first['msg']}; correct PREFECT_API_URL and the "
        "other variables PREFECT_*, or the profile in ~/.prefect/profiles.toml"
    )


def _is_expected(error: Exception) -> bool:
    """Return whether the world may cause an error, not only a bug; a run's log has the traceback of either."""
    return hasattr(error, "__notes__") or isinstance(error, OSError) or type(error).__module__.startswith(SERVICES)


def _report(outcome: str, message: str, error: Exception, code: int) -> int:
    """Print an error with its notes, which name the log and the command that resumes the run, on one line."""
    message = " ".join(message.split())  # Ray's messages have several lines, and so may those of the user's code
    line = "; ".join([f"{outcome}: {message}", *getattr(error, "__notes__", ())])
    errors.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
