"""The advantage stage on a step's real columns, in files: what it computes from per-row scalars, plans and reports."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from infra.storage.runs import RunDirectory
from rl_core.advantages import prepare_updates
from rl_core.columns.jagged import flat_values
from rl_core.planning.balance import QUADRATIC_COST
from schemas.errors import PlanError, RewardFailureError, UserError
from schemas.metrics import values
from schemas.rollout import RolloutHandle, RolloutShard
from schemas.step import AdvantageHandle, PolicyHandle, RunHandle
from tasks.advantage import compute_step_advantages
from tests.support.configs import run_config
from tests.support.small_run import ROWS_PER_SHARD, SAMPLES, columns_of, put_rollout

STEP = 0
MAX_RESPONSE_TOKENS = 12  # of the last sample, which was cut off there
LENGTHS = [len(text.encode()) + (reason == "stop") for _, text, reason, *_ in SAMPLES]


def compute(
    tmp_path: Path,
    rewards: list[float | None] | None = None,
    row_kl: tuple[float, ...] | None = None,
    turns: Sequence[Sequence[float]] = (),
    **overrides: object,
) -> tuple[AdvantageHandle, list[float]]:
    """The stage's handle, and the advantages that the store holds; two prompts of three samples each."""
    config = run_config(
        tmp_path,
        rollout={"max_response_tokens": MAX_RESPONSE_TOKENS},
        store={"kind": "fsspec"},
        runtime={"num_policy_ranks": 2},
        **({"advantage": {"kind": "dr_grpo"}} | overrides),
    )
    directory = RunDirectory.create(config, "run")
    store = columns_of(directory)
    store.open(STEP)
    batch = put_rollout(store, STEP)
    run = RunHandle(run_id="run", identity="run", directory=str(directory.path), config=config, store_incarnation="g")
    rollout = rollout_of([sample[3] for sample in SAMPLES] if rewards is None else rewards, turns)
    policy = PolicyHandle(run_id="run", version=STEP, incarnation="i")
    handle = asyncio.run(compute_step_advantages.fn(run, policy, batch, rollout, row_kl))
    assert directory.plans.load(STEP) == handle.plan
    name = "turn_advantages" if turns else "advantages"
    return handle, flat_values(store.read(handle.batch, [name])[name]).tolist()


def rollout_of(rewards: list[float | None], turns: Sequence[Sequence[float]] = ()) -> RolloutHandle:
    """Return the scalars of the samples with these rewards, and these of their turns."""
    shards = []
    for shard in range(2):
        rows = slice(shard * ROWS_PER_SHARD, (shard + 1) * ROWS_PER_SHARD)
        groups = tuple(sample[0] for sample in SAMPLES[rows])
        shards.append(
            RolloutShard(
                shard=shard,
                worker=shard,
                groups=(shard,),
                rewards=tuple(rewards[rows]),
                group_ids=groups,
                prompt_lengths=(20,) * ROWS_PER_SHARD,
                response_lengths=tuple(LENGTHS[rows]),
                loss_tokens=tuple(LENGTHS[rows]),
                truncated=tuple(sample[2] == "length" for sample in SAMPLES[rows]),
                num_turns=tuple(map(len, turns[rows])),
                turn_rewards=tuple(reward for row in turns[rows] for reward in row),
            )
        )
    return RolloutHandle(step=STEP, policy_version=STEP, shards=tuple(shards))


def test_failed_rewards_take_no_part(tmp_path: Path) -> None:
    handle, advantages = compute(tmp_path)
    assert advantages == [0.25, -0.25, 0.5, 0.0, -0.5]
    assert handle.plan.num_ranks == len(handle.plan.updates[0].ranks) == 2
    assert sorted(handle.plan.updates[0].rows) == [0, 1, 2, 3, 4]
    metrics = values(handle.metrics)
    assert (metrics["reward"], metrics["reward/failed"], metrics["groups/zero_variance"]) == (3.0 / 5, 1, 0.0)
    # Of 0, 0.5, 0.5, 1, 1: at 0.4 and 3.6 of the distances between neighbors.
    assert (metrics["reward/p10"], metrics["reward/p90"]) == (pytest.approx(0.2), 1.0)
    assert not {"reward/shaped", "reward/kl", "overlong/penalty", "overlong/masked"} & set(metrics)


def test_turns_have_advantages_of_their_own(tmp_path: Path) -> None:
    # A failed environment's row has turns, too, but no part in the step.
    rewards = [2.0, 0.0, 1.0, 1.0, None, 3.0]
    turns = [[0.0, 4.0], [0.0], [1.0, 1.0], [2.0], [9.0, 9.0, 9.0], [6.0]]  # of which the reward has half
    weighted = {"kind": "weighted", "parts": {"game": {"weight": 0.5, "reward": {"kind": "environment"}}}}
    environment = {"kind": "class", "path": "tests.support.games:Echo"}
    _, found = compute(
        tmp_path, rewards, turns=turns, advantage={"kind": "turn_level"}, reward=weighted, environment=environment
    )
    # Returns 2, 2; 0; 1, 0.5 and 1; 3. The rewards of the groups have the standard deviations 1 and sqrt(2).
    half = 1 / 2**0.5
    assert found == pytest.approx([1.0, 0.75, -1.0, 0.0, -0.75, -half, half], abs=1e-5)


def test_the_parts_of_a_reward_are_normalized_one_by_one() -> None:
    # Lengths 4, 3, -, 5, 4, 12: only the last, at the limit, has a penalty, which is a part with its weight.
    rewards = [2.0, 0.5, None, 1.0, 3.0, 0.0]
    parts = {"right": (1.0, 0.0, 1.0, 0.0, 1.0, 0.0), "style": (4.0, 2.0, 9.0, 4.0, 8.0, 0.0), "noted": (5.0,) * 6}
    weights = {"right": 1.0, "style": 0.25, "noted": 0.0}
    reward = {"kind": "weighted", "parts": {n: {"weight": w, "reward": {"kind": "exact"}} for n, w in weights.items()}}
    config = run_config(
        rollout={"max_response_tokens": MAX_RESPONSE_TOKENS},
        advantage={"kind": "gdpo"},
        overlong={"buffer_tokens": 6, "penalty": 0.5},
        reward=reward,
    )
    plain = rollout_of(rewards)
    shards = [
        shard.replace(parts={name: values[3 * number : 3 * number + 3] for name, values in parts.items()})
        for number, shard in enumerate(plain.shards)
    ]
    found = prepare_updates(config, STEP, plain.replace(shards=tuple(shards))).advantages
    half = 0.5**0.5
    pair = (1.0 + 0.25) * half  # of two rows, each part is normalized to +-half
    thirds = [np.array(column) for column in ([0.0, 1.0, 0.0], [4.0, 8.0, 0.0], [0.0, 0.0, -0.5])]
    of_parts = [(column - column.mean()) / column.std(ddof=1) for column in thirds]
    sums = np.array([pair, -pair, *(of_parts[0] + 0.25 * of_parts[1] + 0.5 * of_parts[2])])
    assert found == pytest.approx((sums - sums.mean()) / sums.std(ddof=1), abs=1e-5)
    lacking = plain.replace(shards=(shards[0], plain.shards[1]))
    with pytest.raises(UserError, match=r'3 of 5 rows of step 0 have a reward without the part "right"'):
        prepare_updates(config, STEP, lacking)


def test_gdpo_needs_a_weighted_reward_and_no_kl_in_it() -> None:
    with pytest.raises(ValueError, match=r'normalizes each part of a weighted reward, but reward\.kind is "exact"'):
        run_config(advantage={"kind": "gdpo"}, reward={"kind": "exact"})
    parts = {"right": {"reward": {"kind": "exact"}}}
    with pytest.raises(ValueError, match=r"set kl\.in_reward = false, or another advantage\.kind"):
        run_config(
            advantage={"kind": "gdpo"},
            reward={"kind": "weighted", "parts": parts},
            kl={"coef": 0.1, "in_reward": True},
        )


def test_a_shard_without_turns_of_each_row_is_refused() -> None:
    shard = rollout_of([1.0] * 6, [[1.0, 2.0]] * 6).shards[0]
    kept = shard.replace(groups=(0, 1), group_ids=(0, 1, 0)).keep([0])
    assert (kept.num_turns, kept.turn_rewards) == ((2, 2), (1.0, 2.0, 1.0, 2.0))
    with pytest.raises(ValueError, match=r"a shard of 3 rows have other lengths: \{'num_turns': 2\}"):
        RolloutShard.model_validate(shard.model_dump() | {"num_turns": (2, 2)})
    with pytest.raises(ValueError, match=r"6 rewards of 5 turns in 3 rows"):
        RolloutShard.model_validate(shard.model_dump() | {"num_turns": (2, 2, 1)})


def test_all_groups_of_zero_variance(tmp_path: Path) -> None:
    # The step still runs: its rows are trained on, with advantages of 0.
    handle, advantages = compute(tmp_path, [1.0, 1.0, 1.0, 0.1, 0.1, 0.1])
    assert advantages == [0.0] * 6
    assert handle.metrics["groups/zero_variance"].value == 1.0
    assert handle.plan.updates[0].num_live_sequences == 6


def test_penalty_and_kl_shape_the_reward(tmp_path: Path) -> None:
    # Lengths 4, 3, -, 5, 4, 12: only the last is within 6 of the limit, and at it, so that it loses 2. The KL takes
    # half of 1, 0, -, 0, 1, 2 nats; that of the failed row is not looked at.
    handle, advantages = compute(
        tmp_path,
        row_kl=(1.0, 0.0, float("nan"), 0.0, 1.0, 2.0),
        overlong={"buffer_tokens": 6, "penalty": 2.0},
        kl={"coef": 0.5, "in_reward": True},
    )
    # 0.5, 0.5 and 1, 0, -3.
    assert advantages == pytest.approx([0.0, 0.0, 5 / 3, 2 / 3, -7 / 3])
    metrics = values(handle.metrics)
    assert metrics["reward"] == pytest.approx(3.0 / 5)
    assert metrics["reward/shaped"] == pytest.approx(-1.0 / 5)
    assert metrics["overlong/penalty"] == pytest.approx(2.0 / 5)
    assert metrics["reward/kl"] == pytest.approx(4.0 / 5)
    assert metrics["groups/zero_variance"] == 0.5


def test_an_environments_tokens_cost_no_overlong_penalty(tmp_path: Path) -> None:
    # Two of the last row's 12 tokens are an environment's. The other 10 are halfway through the last 4: it loses 1.
    config = run_config(
        tmp_path,
        rollout={"max_response_tokens": MAX_RESPONSE_TOKENS},
        overlong={"buffer_tokens": 4, "penalty": 2.0},
    )
    first, second = rollout_of([sample[3] for sample in SAMPLES]).shards
    rollout = RolloutHandle(step=STEP, policy_version=STEP, shards=(first, second.replace(loss_tokens=(5, 4, 10))))
    found = prepare_updates(config, STEP, rollout)
    assert values(found.metrics)["overlong/penalty"] == pytest.approx(1.0 / 5)
    assert values(found.metrics)["reward/shaped"] == pytest.approx((3.0 - 1.0) / 5)
    assert found.plan.updates[0].num_loss_tokens == 4 + 3 + 5 + 4 + 10


def test_each_step_shuffles_its_rows_anew(tmp_path: Path) -> None:
    config = run_config(tmp_path, optim={"updates_per_step": 2})
    rollout = rollout_of([1.0] * 6)
    plans = [prepare_updates(config, step, rollout).plan for step in (0, 1, 2, 3, 0)]
    assert plans[4] == plans[0]
    assert len({frozenset(plan.updates[0].rows) for plan in plans}) > 1  # the same rows, split in other ways


def test_masked_rows_are_in_the_baseline_but_not_in_the_plan(tmp_path: Path) -> None:
    handle, advantages = compute(tmp_path, overlong={"mask_truncated": True})
    assert advantages == [0.25, -0.25, 0.5, 0.0, -0.5]
    assert sorted(handle.plan.updates[0].rows) == [0, 1, 2, 3]
    assert handle.plan.updates[0].num_loss_tokens == 4 + 3 + 5 + 4
    metrics = values(handle.metrics)
    assert (metrics["overlong/masked"], metrics["rows/skipped"]) == (1.0 / 5, 1)


def test_a_step_without_anything_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(RewardFailureError, match="all 6 rewards of step 0 failed"):
        compute(tmp_path / "failed", [None] * 6)
    with pytest.raises(PlanError, match="nothing to train on"):
        compute(tmp_path / "masked", [None] * 5 + [1.0], overlong={"mask_truncated": True})


def test_a_plan_costs_less_by_what_is_on_different_branches(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout={"max_response_tokens": MAX_RESPONSE_TOKENS})
    rollout = rollout_of([1.0, 2.0, 3.0, None, 5.0, 6.0])
    first, second = rollout.shards
    branched = rollout.replace(shards=(first, second.replace(pairs_apart=(5.0, 0.0, 6.0))))
    assert rollout.pairs_apart == ()
    assert branched.pairs_apart == (0.0, 0.0, 0.0, 5.0, 0.0, 6.0)
    plans = [prepare_updates(config, STEP, each).plan for each in (rollout, branched)]
    costs = [sum(cost for update in plan.updates for cost in update.rank_costs) for plan in plans]
    assert costs[0] - costs[1] == 2 * 6 * QUADRATIC_COST  # the fourth row takes no part
