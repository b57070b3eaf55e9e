"""Command lines in the files of `deploy/`, parsed by the real commands' own parsers, and environment variables."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

import click
import prefect.settings
import typer
from ray.scripts.scripts import cli as ray_app

from flows.cli.main import app as sluice_app
from schemas.config.load import override_config
from schemas.config.run import RunConfig
from tests.support.configs import run_config

# What others read: Ray (its errors name them), botocore under s3fs, and the images' own.
OTHERS = {
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_JOB_STOP_WAIT_TIME_S"),
    *("HF_HOME", "HF_TOKEN"),
    *("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", "PGDATA", "MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD"),
}


def parse(command: Sequence[str]) -> dict[str, object]:
    """Parse a command line of `ray`, `prefect`, `sluice` or `driver`; return its values, but of `prefect`.

    Raises:
        Exception: The command's parser rejects it.
    """
    program, *arguments = command
    if program == "driver":
        return parse(arguments)
    if program == "prefect":
        _check_options(arguments)
        return {}
    if program == "ray":
        return _parse_click(ray_app, arguments)
    if program == "sluice":
        found = _parse_click(typer.main.get_command(sluice_app), arguments)
        settings = [*(found.get("overrides") or [])]
        assert settings_are_accepted(settings).runtime
        return found
    raise AssertionError(f"no parser for {shlex.join(command)}")


def settings_are_accepted(settings: Sequence[str]) -> RunConfig:
    """Return a small run's config with these settings.

    Raises:
        ConfigError: A key or value is refused.
    """
    return override_config(run_config(), settings, "deploy")


def is_read(variable: str) -> bool:
    """Return whether a program reads an environment variable."""
    return variable in OTHERS or (variable.startswith("PREFECT_") and hasattr(prefect.settings, variable))


def _check_options(arguments: list[str]) -> None:
    """Check that `prefect`'s help for the command has each option: its parser has no public function."""
    words = arguments[: next((at for at, word in enumerate(arguments) if word.startswith("-")), len(arguments))]
    command = [sys.executable, "-m", "prefect", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert options <= set(re.findall(r"--[\w-]+", done.stdout)), done.stdout


def _parse_click(app: object, arguments: list[str]) -> dict[str, object]:
    name, *rest = arguments
    command = app.commands[name]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        return _parse_click(command, rest)
    context: click.Context = command.make_context(name, rest)
    return context.params
