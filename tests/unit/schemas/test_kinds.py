"""Every kind of every config union has a function, and a case in the tests that enumerate kinds."""

from typing import Annotated, get_args

import pytest

import flows.answers as answers
import infra.engines.open as engines
import infra.monitors.open as monitors
import infra.stores.open as stores
from rl_core.advantages.estimators import ESTIMATORS
from rl_core.losses import kl
from rl_core.losses.correction import CORRECTIONS
from rl_core.losses.surrogates import SURROGATES
from rl_core.registry import Registry, entry
from rl_core.rewards import LOADERS
from schemas.config.advantage import AdvantageConfig, DrGrpoAdvantage, GrpoAdvantage
from schemas.config.kinds import configs_of, kind_of
from schemas.config.loss import (
    Aggregation,
    CorrectionConfig,
    KlConfig,
    KlEstimator,
    LossConfig,
    NoCorrection,
    TruncatedCorrection,
)
from schemas.config.monitor import MonitorConfig
from schemas.config.reward import PartReward, RewardConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.store import StoreConfig
from tests.support.configs import kinds_of
from tests.unit.rl_core import loss_inputs, reference_updates

REGISTRIES = {
    "advantages": (ESTIMATORS, AdvantageConfig),
    "losses": (SURROGATES, LossConfig),
    "corrections": (CORRECTIONS, CorrectionConfig),
    "rewards": (LOADERS, RewardConfig),
    "answers": (answers.RESPONSES, RewardConfig),
    "engines": (engines.OPENERS, RolloutConfig),
    "stores": (stores.OPENERS, StoreConfig),
    "monitors": (monitors.OPENERS, MonitorConfig),
}


def test_kinds_of_a_union() -> None:
    union = Annotated[Annotated[NoCorrection | TruncatedCorrection, "a discriminator"], "a default kind"]
    assert configs_of(union) == (NoCorrection, TruncatedCorrection)
    assert kinds_of(union) == kinds_of(NoCorrection | TruncatedCorrection) == ("none", "truncated")
    with pytest.raises(TypeError, match="KlConfig has no `kind"):
        kind_of(KlConfig)
    with pytest.raises(TypeError, match="is not a union of config classes"):
        kinds_of(int | str)


@pytest.mark.parametrize(("registry", "union"), REGISTRIES.values(), ids=REGISTRIES)
def test_a_registry_has_all_kinds_of_its_union(registry: Registry[..., object], union: object) -> None:
    assert sorted(registry.kinds) == sorted(kinds_of(union))


def test_kl_estimators() -> None:
    assert set(kl._ESTIMATORS) == set(get_args(KlEstimator))


def test_all_rewards_of_one_response_but_a_sum_can_be_parts() -> None:
    assert {*kinds_of(PartReward), "weighted", "group_function"} == set(kinds_of(RewardConfig))


def test_a_registry_must_have_exactly_one_entry_per_kind() -> None:
    def zero(config: object) -> int:
        return 0

    union = GrpoAdvantage | DrGrpoAdvantage
    entries = [entry(GrpoAdvantage, zero), entry(DrGrpoAdvantage, zero)]
    assert Registry("some.TABLE", union, *entries)(DrGrpoAdvantage()) == 0
    with pytest.raises(
        LookupError, match=r"some\.TABLE has no entry for kind 'dr_grpo' \(DrGrpoAdvantage\); add entry"
    ):
        Registry("some.TABLE", union, entries[0])
    with pytest.raises(LookupError, match="has entries for NoCorrection, which its config union lacks"):
        Registry("some.TABLE", union, *entries, entry(NoCorrection, zero))
    with pytest.raises(LookupError, match="3 entries for 2 kinds"):
        Registry("some.TABLE", union, *entries, entries[0])
    with pytest.raises(LookupError, match=r"some\.TABLE has no entry for kind 'none'"):
        Registry("some.TABLE", union, *entries)(NoCorrection())


def test_loss_tests_have_all_kinds() -> None:
    assert {loss.kind for loss in loss_inputs.LOSSES.values()} == set(kinds_of(LossConfig))
    assert {correction.kind for correction in loss_inputs.CORRECTIONS.values()} == set(kinds_of(CorrectionConfig))
    assert set(loss_inputs.POLICY_TERMS) == set(kinds_of(LossConfig))
    assert set(loss_inputs.WEIGHTS) == set(kinds_of(CorrectionConfig))


def test_the_exactness_invariants_have_all_kinds() -> None:
    chosen = reference_updates.ALGORITHMS.values()
    assert {(each.loss.kind, each.loss.aggregation) for each in chosen} == {
        (kind, aggregation) for kind in kinds_of(LossConfig) for aggregation in get_args(Aggregation)
    }
    assert {each.correction for each in chosen} == set(loss_inputs.CORRECTIONS.values())
    assert {each.kl.estimator for each in chosen} == set(get_args(KlEstimator))
