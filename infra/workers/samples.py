"""Generated and scored samples, as columns for the store and as scalars for the driver. N samples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from infra.datasets import PromptRow
from infra.datasets.teacher_prompts import TeacherPrompts
from infra.engines.base import Generation, SamplingMask, TokenExperts
from infra.environments.trajectory import Trajectory
from infra.history.row_tokens import tree_of, turns_of
from infra.workers.sampling import ScoredResponse
from rl_core.columns.jagged import BRANCH_COLUMNS, branches_of, jagged, pairs_apart, token_dtype
from rl_core.rewards import RewardOutcome, as_stored
from rl_core.rollout.responses import describe_responses
from schemas.catalog import REWARD_PART_PREFIX
from schemas.rollout import RolloutShard, SampleText

MAX_SAMPLE_TEXTS = 4  # per shard, each of a different prompt
MAX_FAILURE_CHARACTERS = 300  # of the reason of one failed reward
MAX_SAMPLE_TURNS = 40  # of a sample's tree


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, scored."""

    sample_id: str
    group_id: int  # the prompt's number within the step
    prompt: PromptRow
    response: ScoredResponse


def to_columns(
    samples: Sequence[Sample],
    policy_version: int,
    vocab_size: int,
    reward_parts: Sequence[str],
    teacher_prompts: TeacherPrompts | None = None,
) -> pa.RecordBatch:
    """Flatten `samples` into one record batch of all rollout columns, N rows in order.

    It has a `reward_<part>` column for each of `reward_parts`, null for samples without that part. If several versions
    sampled, it has `sampler_versions`, and `policy_version` is that of a row's last token. Of several turns, it has the
    columns of the axis `turn`, and `episode_end`. If teachers read other prompts, it has `teacher_prompt_ids`.
    """
    dtype = token_dtype(vocab_size)
    generations = [sample.response.generation for sample in samples]
    response_lengths = np.array([len(generation.token_ids) for generation in generations], dtype=np.int64)
    return pa.record_batch(
        {
            "prompt_ids": _tokens([sample.prompt.prompt_ids for sample in samples], dtype),
            "prompt_text": _texts(sample.prompt.prompt_text for sample in samples),
            "answer": _texts(sample.prompt.answer for sample in samples),
            "info": _texts(json.dumps(sample.prompt.info, default=str) for sample in samples),
            "response_ids": _tokens([generation.token_ids for generation in generations], dtype),
            "loss_mask": jagged(np.concatenate([_trained(generation) for generation in generations]), response_lengths),
            "sampler_logprobs": _tokens([generation.logprobs for generation in generations], np.dtype(np.float32)),
            **_experts([generation.experts for generation in generations if generation.experts is not None]),
            **_sampling_masks([each.sampling_mask for each in generations if each.sampling_mask is not None], dtype),
            **_rewards([sample.response.outcome for sample in samples], reward_parts),
            "response_text": _texts(sample.response.text for sample in samples),
            "sample_id": _texts(sample.sample_id for sample in samples),
            "group_id": pa.array([sample.group_id for sample in samples], type=pa.int32()),
            "finish_reason": _texts(generation.finish_reason for generation in generations),
            **_turns(trajectories_of(samples)),
            **_teacher_prompts(samples, teacher_prompts, dtype),
            **_versions(generations, response_lengths, policy_version),
        }
    )


def make_shard(
    step: int, shard: int, worker: int, groups: Sequence[int], samples: Sequence[Sample], seconds: dict[str, float]
) -> RolloutShard:
    """Return the scalars of a worker's `samples`, all those of `groups`, and the text of a few of them."""
    outcomes = [sample.response.outcome for sample in samples]
    generations = [sample.response.generation for sample in samples]
    trajectories = trajectories_of(samples)
    turns = _turns(trajectories)
    branches = branches_of(*(turns[name] for name in BRANCH_COLUMNS)) if turns else None
    prompts = np.array([len(sample.prompt.prompt_ids) for sample in samples], dtype=np.int64)
    responses = np.array([len(generation.token_ids) for generation in generations], dtype=np.int64)
    first_of_group = {sample.group_id: sample for sample in reversed(samples)}
    return RolloutShard(
        shard=shard,
        worker=worker,
        groups=tuple(groups),
        rewards=tuple(as_stored(outcome.reward) for outcome in outcomes),
        group_ids=tuple(sample.group_id for sample in samples),
        prompt_lengths=tuple(prompts.tolist()),
        **describe_responses(
            [generation.token_ids for generation in generations],
            [_trained(generation) for generation in generations],
            [generation.finish_reason for generation in generations],
        ),
        token_lag=_token_lag(step, samples),
        num_turns=tuple(len(trajectory.turns) for trajectory in trajectories),
        turn_rewards=tuple(as_stored(turn.reward) for trajectory in trajectories for turn in trajectory.turns),
        pairs_apart=tuple(pairs_apart(prompts, responses, branches)) if branches else (),
        parts={
            name: tuple(as_stored(outcome.parts.get(name)) for outcome in outcomes)
            for name in sorted({name for outcome in outcomes for name in outcome.parts})
        },
        failure=first_failure(outcomes),
        failures={
            sample.sample_id: sample.response.outcome.failure[:MAX_FAILURE_CHARACTERS]
            for sample in samples
            if sample.response.outcome.failure is not None
        },
        samples=tuple(_sample_text(first_of_group[group]) for group in sorted(first_of_group)[:MAX_SAMPLE_TEXTS]),
        seconds=seconds,
    )


def num_sampled(generation: Generation) -> int:
    """Return how many tokens of a response the model sampled; the others are an environment's."""
    return int(_trained(generation).sum())


def first_failure(outcomes: Sequence[RewardOutcome]) -> str | None:
    """Return the first reward failure's message, or None if no reward failed."""
    return next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)


def _tokens(rows: Sequence[np.ndarray], dtype: np.dtype) -> pa.LargeListArray:
    values = np.concatenate([np.empty(0, dtype), *(row.astype(dtype) for row in rows)])
    return jagged(values, np.array([len(row) for row in rows], dtype=np.int64))


def trajectories_of(samples: Sequence[Sample]) -> list[Trajectory]:
    """Return the responses of several turns."""
    generations = (sample.response.generation for sample in samples)
    return [generation for generation in generations if isinstance(generation, Trajectory)]


def _trained(generation: Generation) -> np.ndarray:
    if isinstance(generation, Trajectory):
        return generation.loss_mask
    return np.ones(len(generation.token_ids), dtype=bool)


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, pa.Array]:
    if not trajectories:
        return {}
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    lengths = np.array([len(trajectory.turns) for trajectory in trajectories])
    return {
        "turn_tokens": jagged(np.array([turn.num_tokens for turn in turns], dtype=np.int32), lengths),
        "turn_bridge_tokens": jagged(
            np.array([turn.num_environment_tokens for turn in turns], dtype=np.int32), lengths
        ),
        "turn_parents": jagged(
            np.array([parent for trajectory in trajectories for parent in trajectory.parents], dtype=np.int32), lengths
        ),
        "turn_rewards": jagged(np.array([turn.reward for turn in turns], dtype=np.float32), lengths),
        "episode_end": _texts(trajectory.end for trajectory in trajectories),
    }


def _teacher_prompts(
    samples: Sequence[Sample], prompts: TeacherPrompts | None, dtype: np.dtype
) -> dict[str, pa.LargeListArray]:
    if prompts is None:
        return {}
    made: dict[tuple[int, bytes, str, str], np.ndarray] = {}  # usually, the samples of a group have the same
    rows = []
    for sample in samples:
        generation = sample.response.generation
        feedback = generation.feedback if isinstance(generation, Trajectory) else ""
        prompt = sample.prompt
        if (key := (sample.group_id, prompt.prompt_ids.tobytes(), prompt.tools, feedback)) not in made:
            made[key] = prompts.encode(prompt, feedback)
        rows.append(made[key])
    return {"teacher_prompt_ids": _tokens(rows, dtype)}


def _versions(generations: Sequence[Generation], lengths: np.ndarray, version: int) -> dict[str, pa.Array]:
    by_token = [generation.versions for generation in generations if generation.versions is not None]
    if not by_token:
        return {"policy_version": pa.array([version] * len(generations), type=pa.int32())}
    return {
        "policy_version": pa.array([int(versions[-1]) for versions in by_token], type=pa.int32()),
        "sampler_versions": jagged(np.concatenate(by_token), lengths),
    }


def _token_lag(step: int, samples: Sequence[Sample]) -> int | None:
    by_token = [sample.response.generation.versions for sample in samples]
    present = [versions for versions in by_token if versions is not None]
    return sum(int((step - versions).sum()) for versions in present) if present else None


def _experts(rows: Sequence[TokenExperts]) -> dict[str, pa.LargeListArray]:
    if not rows:
        return {}
    sides = {"prompt_experts": [row.prompt for row in rows], "response_experts": [row.response for row in rows]}
    return {
        name: jagged(np.concatenate(parts), np.array([len(part) for part in parts])) for name, parts in sides.items()
    }


def _sampling_masks(rows: Sequence[SamplingMask], dtype: np.dtype) -> dict[str, pa.LargeListArray]:
    if not rows:
        return {}
    return {
        "sampling_mask_counts": _tokens([row.counts for row in rows], np.dtype(np.int32)),
        "sampling_mask_ids": _tokens([row.token_ids for row in rows], dtype),
    }


def _texts(values: object) -> pa.Array:
    return pa.array(values, type=pa.string())


def _rewards(outcomes: Sequence[RewardOutcome], parts: Sequence[str]) -> dict[str, pa.Array]:
    columns = {"reward": [outcome.reward for outcome in outcomes]}
    for name in parts:
        columns[REWARD_PART_PREFIX + name] = [outcome.parts.get(name) for outcome in outcomes]
    return {name: pa.array(values, type=pa.float32()) for name, values in columns.items()}


def _sample_text(sample: Sample) -> SampleText:
    return SampleText(
        prompt=sample.prompt.prompt_text,
        response=sample.response.text,
        answer=sample.prompt.answer,
        reward=as_stored(sample.response.outcome.reward),
        tree=_tree(sample),
    )


def _tree(sample: Sample) -> str:
    """Return a trajectory's turns as a tree; empty for a response without an environment."""
    generation = sample.response.generation
    if not isinstance(generation, Trajectory):
        return ""
    texts, has_failed = [turn.action for turn in generation.turns], sample.response.outcome.reward is None
    turns, num_prompt = turns_of(_turns([generation]), 0), len(sample.prompt.prompt_ids)
    is_trained = False if has_failed else None  # its group may be dropped
    return tree_of(turns, texts, num_prompt, is_trained=is_trained, max_turns=MAX_SAMPLE_TURNS)
