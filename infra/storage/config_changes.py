"""The config that a run is resumed with."""

from infra.storage.runs import RunDirectory
from schemas.config.changes import keep_batches, keep_date, rejected_changes
from schemas.config.run import RunConfig
from schemas.errors import RunError


def resumed_config(directory: RunDirectory, config: RunConfig) -> RunConfig:
    """Return the config that a run goes on with if `config` is asked for; see `keep_batches` and `keep_date`.

    Raises:
        RunError: With `config`, the run would train something else than before.
    """
    before = directory.config()
    config = keep_date(before, config)
    if rejected := rejected_changes(before, config):
        raise RunError(
            f"run {directory.run_id} can't be resumed with a different {', '.join(rejected)}: that would be another "
            "run; start that with sluice train, or resume without this change"
        )
    return keep_batches(before, config)
