"""How workers are laid out: decided from the config and the cluster's size alone."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.workers.layout import (
    decide_device,
    nearest_configs,
    reward_model_of,
    reward_workers,
    spread_over_cores,
    spread_over_gpus,
)
from schemas.errors import ConfigError
from tests.support.configs import placed_config, run_config


def test_auto_takes_gpus_if_there_are_any_and_never_falls_back(tmp_path: Path) -> None:
    auto = placed_config(tmp_path, ranks=2, rollout=2)
    assert decide_device(auto, [], num_cpus=2) == "cpu"
    assert decide_device(auto, [2, 2], num_cpus=2) == "cuda"
    assert decide_device(placed_config(tmp_path, device="cpu"), [8], num_cpus=2) == "cpu"
    with pytest.raises(
        ConfigError, match=r"needs 4 GPUs \(2 policy, 2 rollout; separate\), but the cluster has 3"
    ) as caught:
        decide_device(auto, [3], num_cpus=2)
    assert 'what fits: runtime.placement = "colocated" or runtime.num_policy_ranks = 1; or add nodes' in str(
        caught.value
    )
    with pytest.raises(ConfigError, match=r'has 0; what fits: runtime\.device = "cpu";'):
        decide_device(placed_config(tmp_path, device="cuda"), [], num_cpus=2)


def test_an_engine_of_several_gpus_needs_a_node_that_has_them(tmp_path: Path) -> None:
    of = placed_config(tmp_path, ranks=2, rollout=2, tensor_parallel=4)
    assert decide_device(of, [8, 2], num_cpus=2) == decide_device(of, [5, 5], num_cpus=2) == "cuda"
    with pytest.raises(ConfigError, match=r"needs 10 GPUs \(2 policy, 2 rollout with 4 each; separate\), but .* has 8"):
        decide_device(of, [4, 4], num_cpus=2)
    with pytest.raises(ConfigError) as caught:
        decide_device(of, [6, 3, 3], num_cpus=2)
    assert str(caught.value) == (
        "rollout.tensor_parallel = 4 needs 4 GPUs of one node for each of 2 engines, but the nodes have 6, 3, 3, "
        "enough for 1; what fits: rollout.tensor_parallel = 2 or rollout.num_workers = 1; or add nodes"
    )
    with pytest.raises(ValidationError, match=r'tensor_parallel = 4 gives an engine GPUs of its own.*= "separate"'):
        placed_config(tmp_path, tensor_parallel=4, placement="colocated")
    assert list(spread_over_gpus(of, [5, 5]).values()) == [0, 1, 0, 1]  # engines first, ranks where GPUs are left


@pytest.mark.parametrize(
    ("made", "gpus"),
    [
        ({"ranks": 8, "rollout": 4}, [8]),
        ({"ranks": 4, "rollout": 2, "reference": 1}, [5]),
        ({"ranks": 1, "rollout": 6}, [4]),
        ({"ranks": 6, "rollout": 2, "placement": "colocated"}, [4]),
        ({"ranks": 2, "rollout": 2, "tensor_parallel": 4}, [6, 2, 2]),
        ({"ranks": 3, "rollout": 3, "tensor_parallel": 2}, [8]),
    ],
)
def test_the_advised_changes_fit(tmp_path: Path, made: dict[str, Any], gpus: list[int]) -> None:
    keys = {"runtime.num_policy_ranks": "ranks", "rollout.num_workers": "rollout", "runtime.placement": "placement"}
    keys["rollout.tensor_parallel"] = "tensor_parallel"
    with pytest.raises(ConfigError):
        decide_device(placed_config(tmp_path, **made), gpus, num_cpus=8)
    for advice in nearest_configs(placed_config(tmp_path, **made), gpus):
        changes = dict(change.split(" = ") for change in advice.split(" with "))
        changed = {**made, **{keys.get(key, "device"): value.strip('"') for key, value in changes.items()}}
        decide_device(placed_config(tmp_path, **changed), gpus, num_cpus=8)


def test_reward_workers_have_gpus_of_their_own_or_share_them(tmp_path: Path) -> None:
    model = {"kind": "model", "path": "liked", "num_workers": 3}
    of = run_config(tmp_path, reward=model, rollout={"num_workers": 2})
    with pytest.raises(ConfigError, match=r"needs 6 GPUs \(1 policy, 2 rollout, 3 reward; .* has 5") as caught:
        decide_device(of, [5], num_cpus=2)
    assert 'colocated" or rollout.num_workers = 1; or' in str(caught.value)
    assert "reward.num_workers = 2" in nearest_configs(of.replace(rollout=run_config(tmp_path).rollout), [4])
    colocated = of.replace(runtime=of.runtime.replace(placement="colocated"))
    assert decide_device(colocated, [3], num_cpus=2) == "cuda"
    assert nearest_configs(colocated, [1])[0] == "rollout.num_workers = 1 with reward.num_workers = 1"
    assert spread_over_cores(of, [1, 1])["reward", 2] == 1


def test_the_workers_of_the_reward_models_of_a_sum_are_numbered_in_its_order(tmp_path: Path) -> None:
    parts = {
        name: {"reward": {"kind": "model", "path": name, "num_workers": count}}
        for name, count in (("liked", 2), ("safe", 1))
    }
    parts["right"] = {"reward": {"kind": "exact"}}
    of = run_config(tmp_path, reward={"kind": "weighted", "parts": parts})
    assert reward_workers(of) == [range(2), range(2, 3)]
    assert [reward_model_of(of, number).path for number in range(3)] == ["liked", "liked", "safe"]
    assert nearest_configs(of, [3]) == ['runtime.placement = "colocated"', 'runtime.device = "cpu"']
    one = run_config(tmp_path, reward={"kind": "weighted", "parts": {"liked": parts["liked"], "right": parts["right"]}})
    assert "reward.parts.liked.reward.num_workers = 1" in nearest_configs(one, [3])
    assert reward_workers(run_config(tmp_path)) == []


def test_workers_are_spread_over_nodes_and_ranks_packed(tmp_path: Path) -> None:
    of = placed_config(tmp_path, ranks=6, rollout=3, reference=1)
    assert list(spread_over_cores(of, [4, 4, 2]).values()) == [0, 0, 0, 0, 1, 1, 2, 0, 1, 2]
    assert set(spread_over_cores(of, [8]).values()) == {0}
    assert list(spread_over_cores(of, [1, 1]).values()) == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
