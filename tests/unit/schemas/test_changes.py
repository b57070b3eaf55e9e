"""What may change when a run is resumed: every key is decided on, and all that an error advises is possible."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import schemas
from schemas.config.changes import (
    CHANGEABLE,
    SCORING,
    is_changeable,
    keep_batches,
    rejected_changes,
    sampling_digest,
    scoring_digest,
)
from schemas.config.judge import JudgeReward
from schemas.config.load import _fields_at, changed_keys, override_config
from schemas.config.renamed import REMOVED, RENAMED
from schemas.config.reward_base import IsolatedReward
from schemas.config.rollout import ProgramRollout, TransformersRollout, VllmRollout
from schemas.config.run import RunConfig
from tests.support.configs import run_config

ROOT = Path(schemas.__file__).parents[1]
SECTIONS = [name for name in RunConfig.model_fields if _fields_at([name])]
KEY = re.compile(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z][a-z_]*(?:\.[a-z_]+)*")

# Sections, and keys of other sections, that decide what is trained.
TRAINED_SECTIONS = {
    *("name", "seed", "model", "data", "reward", "rollout", "environment", "overlong", "advantage", "loss", "kl"),
    *("distillation", "correction", "optim", "sft"),
}
TRAINED = {"runtime.max_staleness"}
WHERE_ONLY = {  # in such a section, but the same bit for bit
    *("model.gradient_checkpointing", "data.eval_path", "optim.offload"),
    *(f"reward.{name}" for name in ("max_failure_fraction", "num_processes", "num_workers", "timeout_seconds")),
    *(f"reward.{name}" for name in ("url", "api_key_variable", "max_retries", "concurrency")),
    *(f"rollout.{name}" for name in ("num_workers", "batch_prompts", "max_num_seqs", "max_cache_bytes", "cache_bytes")),
    *(f"rollout.{name}" for name in ("gpu_memory_utilization", "enforce_eager", "tensor_parallel", "prefix_cache")),
    *("rollout.python", "rollout.program"),
    *(f"environment.{name}" for name in ("num_processes", "python", "journal", "memory_bytes")),
    *(f"environment.{name}_timeout_seconds" for name in ("reset", "step", "trajectory")),
}

# Of the keys that decide what is trained, those that messages name: they are for `sluice train`, before a run exists,
# describe data or model, or offer a second remedy next to one that works.
FOR_A_NEW_RUN = {
    *(
        "advantage.kind",
        "correction.kind",
        "data.chat_template_kwargs",
        "data.max_prompt_tokens",
        "data.overlong",
        "data.sources",
        "data.train_path",
        "distillation.divergence",
        "distillation.reward_weight",
        "distillation.teachers",
        "distillation.top_k",
        "kl.coef",
    ),
    *(f"data.curriculum.{name}" for name in ("kind", "field", "starts")),
    *("data.reuse", *(f"data.reuse.{name}" for name in ("num_groups", "max_age", "run", "steps"))),
    *(
        "kl.in_reward",
        "loss.entropy_coef",
        "loss.observation_coef",
        "loss.kind",
        "model.lora",
        "model.path",
        "optim.kind",
        "optim.lr",
        "optim.schedule",
        "optim.updates_per_step",
    ),
    *(
        "optim.implementation",
        "rollout.router_replay",
        "rollout.sampling_mask",
        "rollout.top_p",
        "rollout.top_k",
        "rollout.min_p",
    ),
    *(
        "sft.loss_on",
        "sft.tools",
        "sft.num_rows",
        "sft.max_tokens",
        "loss.kind",
        "loss.aggregation",
        "loss.norm_tokens",
    ),
    *(f"environment.{name}" for name in ("kind", "tools", "path", "arguments", "parser", "command", "grader")),
    *(
        "environment.drops_reasoning",
        "environment.max_turn_tokens",
        "environment.resume_rows",
        "environment.lockstep_steps",
        "environment.sandbox",
        *(f"environment.sandbox.{name}" for name in ("kind", "image", "network", "path")),
    ),
    *(f"reward.{name}" for name in ("model", "pattern", "scale", "max_tokens")),  # of a judge
    *("overlong.buffer_tokens", "reward.kind", "reward.path", "rollout.dynamic_sampling", "rollout.kind"),
    *("rollout.dtype", "rollout.max_response_tokens", "rollout.num_prompts", "rollout.samples_per_prompt"),
    "rollout.stop_token_ids",
    *(
        "model.compute_dtype",
        "rollout.stop",
        "runtime.max_staleness",
        *("model.lora.publish", "model.lora.rank", "model.lora.target_modules"),
        "rollout.dynamic_sampling.max_rounds",
    ),
}
# Another value for each key that may change and that the code names.
OTHER = {
    "checkpoint.every_steps": "7",
    "checkpoint.keep_last": "7",
    "checkpoint.url": "elsewhere",
    "data.eval_path": "other.parquet",
    "environment.journal": "false",
    "environment.memory_bytes": "7",
    "environment.num_processes": "7",
    "environment.python": "venv/bin/python",
    "environment.reset_timeout_seconds": "7",
    "environment.step_timeout_seconds": "7",
    "environment.trajectory_timeout_seconds": "7",
    "eval.every_steps": "7",
    "eval.max_response_tokens": "9",
    "eval.samples_per_prompt": "4 eval.temperature=1.0",
    "eval.temperature": "0.5",
    "model.gradient_checkpointing": "true",
    "optim.offload": "true",
    "packing.kind": "padded",
    "packing.share_prompts": "false",
    "packing.token_budget": "9999",
    "reward.api_key_variable": "JUDGE_KEY",
    "reward.concurrency": "7",
    "reward.max_failure_fraction": "1",
    "reward.max_retries": "7",
    "reward.num_processes": "7",
    "reward.num_workers": "7",
    "reward.timeout_seconds": "7",
    "reward.url": "http://other/v1",
    "rollout.batch_prompts": "3",
    "rollout.python": "venv/bin/python",
    "rollout.program": "other.py",
    "rollout.cache_bytes": "9999",
    "rollout.enforce_eager": "true",
    "rollout.gpu_memory_utilization": "0.7",
    "rollout.max_cache_bytes": "9999",
    "rollout.max_num_seqs": "7",
    "rollout.num_workers": "3",
    "rollout.prefix_cache": "version",
    "rollout.tensor_parallel": "2",
    "runtime.device": "cpu",
    "runtime.gradient_sync": "every_micro_batch",
    "runtime.num_reference_ranks": "2",
    "approval.timeout_seconds": "7",
    "approval.when": "['kl>0.2']",
    # without blanks, as overrides are split at them
    "services.secrets": '{KEY="{{prefect.blocks.secret.key}}"}',
    "services.dir": "elsewhere",
    "services.py_modules": "['my_rewards.py']",
    "timeouts.collective_seconds": "7",
    "timeouts.driver_seconds": "90",
    "timeouts.engine_seconds": "900",
    "runtime.placement": "colocated",
    "timeouts.notice_seconds": "9",
    "timeouts.resource_seconds": "9",
    "runtime.runs_dir": "elsewhere",
    "runtime.num_policy_ranks": "4",
    "runtime.num_policy_replicas": "2",
    "runtime.profile_steps": "[0]",
    "services.prefect_api_url": "http://localhost:4200/api",
    "services.prefect_patience_seconds": "7",
    "approval.on_failed_queries": "true approval.queries=queries",
    "approval.queries": "queries",
    "services.ray_address": "localhost:6379",
    "runtime.shared_memory": "memory",
    "services.tls_certificate": "certificate.pem services.tls_key=key.pem",
    "services.tls_key": "key.pem services.tls_certificate=certificate.pem",
    "runtime.tracing": "true",
    "weights.transport": "broadcast",
    "weights.bucket_bytes": "99999",
    "weights.probe": "false",
    "timeouts.worker_seconds": "7",
    "store.capacity_bytes": "9999",
    "store.compression": "zstd",
    "store.keep_bytes": "7",
    "store.keep_steps": "7",
    "store.kind": "shared",
    "store.url": "memory://columns",
}


def test_every_key_is_decided_on() -> None:
    decided = {key for key in _keys() if key in TRAINED or key.partition(".")[0] in TRAINED_SECTIONS} - WHERE_ONLY
    undecided = {key for key in _keys() if not is_changeable(key)} ^ decided
    assert not undecided, f"of a section that trains: in WHERE_ONLY and CHANGEABLE, or in neither: {sorted(undecided)}"
    assert all(any(key == name or key.startswith(name) for key in _keys()) for name in (*CHANGEABLE, *SCORING))


def _keys() -> set[str]:
    keys = set()
    for name in RunConfig.model_fields:
        keys |= {f"{name}.{key}" for key in _fields_at([name])} or {name}
    return keys


@cache
def _mentioned() -> frozenset[str]:
    """Return the keys that messages of the code name."""
    files = [
        path for layer in ("schemas", "rl_core", "infra", "tasks", "flows") for path in (ROOT / layer).rglob("*.py")
    ]
    return frozenset(key for path in files for text in _texts(path) for key in KEY.findall(text))


def _texts(path: Path) -> Iterator[str]:
    """Yield a file's string literals that are sentences or single keys, but no docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from [node.value] if " " in node.value or KEY.fullmatch(node.value) else []


NAMED = sorted(key for key in _mentioned() if key in _keys() and is_changeable(key))


def test_what_a_message_names_may_change_or_is_for_a_new_run() -> None:
    fixed = {key for key in _mentioned() if not is_changeable(key)}
    names = {"model.save_pretrained", "model.safetensors", "model.safetensors.index.json"}  # not keys
    unknown = fixed - names - {*REMOVED, *RENAMED} - FOR_A_NEW_RUN
    assert not unknown, f"messages name these, which may not change: advise something else, or FOR_A_NEW_RUN: {unknown}"


@pytest.mark.parametrize("key", NAMED)
def test_an_advised_change_is_accepted(key: str) -> None:
    assert key in OTHER, f"a message names {key}: add another value of it to OTHER"
    rollouts = ({"kind": "transformers"}, {"kind": "vllm"}, {"kind": "program", "program": "engine.py"})
    kinds = dict(zip((TransformersRollout, VllmRollout, ProgramRollout), rollouts, strict=True))
    name = key.removeprefix("rollout.")
    rollout = next((given for kind, given in kinds.items() if name in kind.model_fields), rollouts[0])
    judge = {"kind": "judge", "url": "http://one/v1", "model": "judge", "prompt": "{response}"}
    rewards = dict.fromkeys(JudgeReward.model_fields.keys() - IsolatedReward.model_fields, judge)
    rewards |= {"num_workers": {"kind": "model", "path": "model"}}
    function = {"kind": "function", "path": "my:score"}
    environment = {"kind": "class", "path": "game:Game"}
    if key == "environment.memory_bytes":
        environment = {"kind": "program", "command": ["agent"]}
    begun = run_config(
        **({"environment": environment} if key.startswith("environment.") else {}),
        reward=rewards.get(key.removeprefix("reward."), function),
        rollout=rollout,
        runtime={"num_policy_ranks": 2},
    )
    resumed = override_config(begun, f"{key}={OTHER[key]}".split(" "), "demo")
    assert [each for each in changed_keys(begun, resumed) if f"{each}.".startswith(f"{key}.")]
    assert rejected_changes(begun, resumed) == []
    assert sampling_digest(resumed) == sampling_digest(begun)
    is_scoring = any(key == name or key.startswith(name) for name in SCORING)
    assert (scoring_digest(resumed) != scoring_digest(begun)) == is_scoring


@pytest.mark.parametrize("key", ["url", "api_key_variable", "max_retries", "concurrency"])
def test_where_a_judge_in_a_sum_is_may_change(key: str) -> None:
    judge = {"kind": "judge", "url": "http://one/v1", "model": "judge", "prompt": "{response}"}
    begun = run_config(reward={"kind": "weighted", "parts": {"quality": {"weight": 1, "reward": judge}}})
    resumed = override_config(begun, [f"reward.parts.quality.reward.{key}={OTHER[f'reward.{key}']}"], "demo")
    assert changed_keys(begun, resumed) == [f"reward.parts.quality.reward.{key}"]
    assert rejected_changes(begun, resumed) == []


def test_the_workers_of_a_reward_model_in_a_sum_may_change() -> None:
    model = {"weight": 1, "reward": {"kind": "model", "path": "model"}}
    begun = run_config(reward={"kind": "weighted", "parts": {"liked": model}})
    changes = {name: f"reward.parts.liked.reward.{name}" for name in ("num_workers", "max_tokens")}
    resumed = {name: override_config(begun, [f"{key}=7"], "demo") for name, key in changes.items()}
    assert rejected_changes(begun, resumed["num_workers"]) == []
    assert sampling_digest(begun) == sampling_digest(resumed["num_workers"])
    assert rejected_changes(begun, resumed["max_tokens"]) == [changes["max_tokens"]]


def test_the_ranks_of_a_teacher_and_what_its_prompts_may_take_may_change() -> None:
    begun = run_config(distillation={"teachers": {"big": {"path": "teacher"}}})
    resumed = {
        name: override_config(begun, [f"distillation.teachers.big.{name}={value}"], "demo")
        for name, value in {"num_ranks": 7, "max_prompt_tokens": 7, "path": "other"}.items()
    }
    for name in ("num_ranks", "max_prompt_tokens"):
        assert rejected_changes(begun, resumed[name]) == []
        assert sampling_digest(begun) == sampling_digest(resumed[name])
    assert rejected_changes(begun, resumed["path"]) == ["distillation.teachers.big.path"]


def test_what_runs_a_container_may_change_but_not_its_image() -> None:
    sandbox = {"kind": "container", "image": "one"}
    begun = run_config(environment={"kind": "program", "command": ["agent"], "sandbox": sandbox})
    resumed = {
        name: override_config(begun, [f"environment.sandbox.{name}={value}"], "demo")
        for name, value in {"program": "podman", "image": "two"}.items()
    }
    assert rejected_changes(begun, resumed["program"]) == []
    assert sampling_digest(begun) == sampling_digest(resumed["program"])
    assert rejected_changes(begun, resumed["image"]) == ["environment.sandbox.image"]


def test_a_change_of_what_is_trained_changes_all_digests() -> None:
    begun = run_config()
    other = begun.replace(seed=1)
    assert rejected_changes(begun, other) == ["seed"]
    assert sampling_digest(other) != sampling_digest(begun)
    assert scoring_digest(other) != scoring_digest(begun)
    stale = override_config(begun, ["runtime.max_staleness=1", "correction.kind=truncated"], "demo")
    assert rejected_changes(begun, stale) == [
        "correction.cap",
        "correction.kind",
        "correction.level",
        "runtime.max_staleness",
    ]


@pytest.mark.parametrize(("workers", "batch_prompts", "kept"), [(3, None, 8), (1, None, 8), (3, 2, 2), (2, None, None)])
def test_another_number_of_workers_decodes_the_same_prompts_together(
    workers: int, batch_prompts: int | None, kept: int | None
) -> None:
    begun = run_config(rollout={"num_prompts": 16, "num_workers": 2})
    asked = run_config(rollout={"num_prompts": 16, "num_workers": workers, "batch_prompts": batch_prompts})
    resumed = keep_batches(begun, asked)
    assert resumed.rollout.batch_prompts == kept
    assert resumed.rollout.num_workers == workers
    assert keep_batches(resumed, asked) == resumed  # asked for again, as a deployment does
