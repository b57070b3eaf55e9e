"""Keys of earlier versions: refused with what to use now, and translated in the stored config of a run."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.storage.runs import RunDirectory
from schemas.config.load import _fields_at, load_config
from schemas.config.renamed import REMOVED, RENAMED, require_current_keys, translate
from schemas.config.run import RunConfig
from schemas.config.runtime import MetricLimit
from schemas.errors import ConfigError
from tests.support.configs import config_toml, run_config

STORED = Path(__file__).parents[2] / "support" / "stored_runs"
ORPHANS = r"runtime\.orphan_seconds is now timeouts\.driver_seconds"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(config_toml())
    return path


def test_an_old_name_is_refused_with_the_new_one_however_it_is_given(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=ORPHANS):
        load_config(config_file, ["runtime.orphan_seconds=9"])
    with pytest.raises(ValidationError, match=ORPHANS):  # as a deployment's parameters are read, too
        run_config(runtime={"orphan_seconds": 9})
    config_file.write_text(config_toml(runtime={"orphan_seconds": 9, "tensorboard": True}))
    with pytest.raises(ConfigError) as refused:
        load_config(config_file)
    assert str(refused.value) == (
        f"{config_file}: runtime.orphan_seconds is now timeouts.driver_seconds; "
        'runtime.tensorboard was removed in 0.3: monitors = [{ kind = "tensorboard" }] writes them'
    )


def test_new_names_are_keys_and_old_ones_are_not() -> None:
    def is_key(key: str) -> bool:
        *place, name = key.replace("*", "0").split(".")
        return name in _fields_at(place)

    assert all(map(is_key, RENAMED.values()))
    assert not any(map(is_key, (*RENAMED, *REMOVED)))


def test_keys_of_the_environments_of_data_sources_are_translated() -> None:
    old = {"kind": "class", "path": "games:Chess", "admission": "wave", "admission_steps": 3}
    new = {"kind": "class", "path": "games:Chess", "resume_rows": "batch", "lockstep_steps": 3}
    stored = {"environment": dict(old), "data": {"sources": [{"name": "a"}, {"name": "b", "environment": dict(old)}]}}
    with pytest.raises(ValueError, match=r"data\.sources\.\*\.environment\.admission is now data\.sources\.\*\.env"):
        require_current_keys(stored)
    translate(stored)
    assert stored == {"environment": new, "data": {"sources": [{"name": "a"}, {"name": "b", "environment": new}]}}


@pytest.mark.parametrize("name", ["0.2.0", "unreleased"])
def test_the_config_of_an_earlier_versions_run_opens(tmp_path: Path, name: str) -> None:
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "config.json").write_bytes((STORED / f"{name}.json").read_bytes())
    config = RunDirectory.open("stored", str(tmp_path)).config()
    expected: dict[str, Any] = {
        "steps": 9,
        "name": "stored",
        "model": {"path": "model"},
        "data": {"train_path": "train.jsonl"},
        "reward": {"kind": "exact"},
        "rollout": {"num_prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 16},
        "runtime": {"num_policy_ranks": 2},
        "services": {"dir": "state", "ray_address": "head:6379"},
        "weights": {"transport": "shared_memory"},
    }
    if name == "0.2.0":
        expected["model"] = {"path": "model", "compute_dtype": "float32"}
    else:
        expected["timeouts"] = {"driver_seconds": 60}
        expected["weights"] = {"transport": "broadcast"}
        expected["approval"] = {"when": (MetricLimit(metric="kl", comparison=">", value=0.2),)}
    assert config == RunConfig.model_validate(expected)
