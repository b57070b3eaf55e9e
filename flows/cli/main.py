"""The entry point of the `sluice` command, with its error messages and exit codes."""

import sys
from typing import NoReturn

from rich.console import Console

from flows.cli.commands import app
from flows.cli.installation import explain_import_error
from infra.ray.module_path import append_working_directory
from schemas.errors import PipelineError, UserError

USER_ERROR, PIPELINE_ERROR = 2, 1

errors = Console(stderr=True)


def main() -> None:
    """Run the command; print a one-line message for an error that the user can fix, or that stopped a run."""
    append_working_directory()  # a reward function may be next to the config
    try:
        app()
    except UserError as error:
        _exit_with(error)
    except ImportError as error:
        if (reason := explain_import_error(error)) is None:
            raise
        _exit_with(reason)
    except PipelineError as error:
        errors.print(
            f"stopped: {type(error).__name__}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(PIPELINE_ERROR)


def _exit_with(error: UserError) -> NoReturn:
    errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
