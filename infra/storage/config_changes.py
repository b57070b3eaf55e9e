"""The settings of a run that may differ when it is resumed."""

from infra.storage.runs import RunDirectory
from schemas.config.load import changed_keys
from schemas.config.run import RunConfig
from schemas.errors import RunError

# Where and how long a run trains may change, but not what it trains.
CHANGEABLE = (
    "steps",
    "note",
    "runtime.",
    "monitors",
    "packing.",
    "eval.",
    "checkpoint.every_steps",
    "checkpoint.keep_",
)
FIXED = ("runtime.max_staleness",)


def check_changes(directory: RunDirectory, config: RunConfig) -> list[str]:
    """Return the keys in which `config` differs from the run's own config, if all of them may change.

    Raises:
        RunError: With `config`, the run would train something else than before.
    """
    changed = changed_keys(directory.config(), config)
    if rejected := [key for key in changed if not key.startswith(CHANGEABLE) or key in FIXED]:
        raise RunError(
            f"run {directory.run_id} can't be resumed with a different {', '.join(rejected)}: that would be another "
            f"run; only {', '.join(CHANGEABLE)} may change (but not {', '.join(FIXED)})"
        )
    return changed


def change_config(directory: RunDirectory, config: RunConfig) -> bool:
    """Make `config` the run's config; return whether it differs from the one before.

    Raises:
        RunError: With `config`, the run would train something else than before.
    """
    changed = check_changes(directory, config)
    if changed:
        directory.write_config(config)
    return bool(changed)
