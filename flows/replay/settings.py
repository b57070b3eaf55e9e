"""What a replay and a fork may change of a run's settings."""

from collections.abc import Sequence

from infra.storage.runs import RunDirectory
from schemas.config.changes import is_changeable
from schemas.config.load import changed_keys, override_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError

# Of the stages after the rollout: with other ones, the same rows are trained on.
SECTIONS = ("reward", "advantage", "overlong", "kl", "correction", "loss", "optim")
# By whom and where these are computed, which may change results by rounding; only keys that a resume may change, too.
PLACES = ("packing.", "runtime.", "model.gradient_checkpointing")


def replay_config(directory: RunDirectory, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig, tuple[str, ...]]:
    """Return the config of the run, that of the replay, and the dotted keys in which the replay trains differently.

    The first has the replay's places of computation, so that the two differ in these keys only.

    Raises:
        ConfigError: An override is invalid, or would change the rows.
    """
    before = directory.config()
    after = override_config(before, overrides, directory.run_id)
    changed = changed_keys(before, after)
    if rejected := [key for key in changed if not (_is_section(key) or _is_place(key))]:
        raise ConfigError(
            f"a replay uses the rows that run {directory.run_id} stored, which a different {', '.join(rejected)} would "
            f"change or doesn't affect; sluice fork starts a run that goes on with it. What a replay may change: "
            f"{', '.join(SECTIONS)}"
        )
    places = before.replace(runtime=after.runtime, packing=after.packing, model=after.model)
    return places, after, tuple(key for key in changed if _is_section(key) and not is_changeable(key))


def changes_rewards(changed: Sequence[str]) -> bool:
    """Return whether rewards have to be computed again if these keys differ."""
    return any(key == "reward" or key.startswith("reward.") for key in changed)


def _is_section(key: str) -> bool:
    return key.split(".")[0] in SECTIONS


def _is_place(key: str) -> bool:
    return key.startswith(PLACES) and is_changeable(key)
