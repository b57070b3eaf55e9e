"""Reading run configs: overrides, error messages, defaults."""

import math
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args

import pytest
from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from schemas.base import FrozenConfig
from schemas.config.kinds import union_members
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from tests.support.configs import kinds_of

MINIMAL = """
steps = 3
[model]
path = "model"
[data]
train_path = "train.parquet"
[reward]
kind = "exact"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def test_overrides_are_typed_and_the_last_one_wins(path: Path) -> None:
    config = load_config(path, ["optim.lr=1e-4", "optim.lr=2e-4", "optim.betas=[0.8, 0.9]", "data.shuffle=false"])
    assert config.optim.lr == 2e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.data.shuffle is False
    assert load_config(path, ["model.path=some/folder"]).model.path == "some/folder"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optim.lrr=1",
            "unknown key optim.lrr; did you mean 'lr'? allowed here: betas, epsilon, implementation, kind, lr,",
        ),
        ("optm.lr=1", "unknown key optm; did you mean 'optim'?"),
        ("optim.lr=-1", "optim.lr = -1: Input should be greater than 0"),
        ("optim.schedule=step", "optim.schedule = 'step': Input should be 'constant', 'linear' or 'cosine'"),
        ("reward.kind=function", "missing key reward.path"),
        ("reward.path=a:b", "unknown key reward.path; allowed here: kind, max_failure_fraction"),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt = 1: Input should be greater than or equal to 2"),
        ("steps", "is not of the form section.key=value"),
        ("steps.x=1", "'steps' is a value, not a section"),
        ("name=../x", "is not a safe name"),
        ("loss.aggregation=sequence_mean", "Input should be 'token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum'"),
        ("loss.norm_tokens=100", 'norm_tokens is only for aggregation "seq_mean_token_sum_norm", not for "token_mean"'),
        ("loss.dual_clip=1", "loss.dual_clip = 1: Input should be greater than 1"),
        ("loss.kl_coef=0.1", "unknown key loss.kl_coef; "),
        ("store.lease_seconds=9", "store.lease_seconds was removed in 0.3: columns stay until their step is cleared"),
        ("advantage={kind='rloo', epsilon=1e-6}", "unknown key advantage.epsilon; allowed here: kind"),
        ("loss.observation_coef=0.1", "trains on what an environment answers, but there is none; set environment.kind"),
        ("rollout.sampling_mask=true", "rollout.sampling_mask = true, but nothing is truncated: set rollout.top_p, "),
        (
            "rollout={kind='vllm', sampling_mask=true, top_k=9}",
            "rollout.sampling_mask = true needs the tokens that trun",
        ),
        ("kl.estimator=k4", "kl.estimator = 'k4': Input should be 'k1', 'k2' or 'k3'"),
        ("correction.cap=0", "correction.cap = 0: Input should be greater than 0"),
        ("correction={kind='masked', low=3.0, high=2.0}", "low = 3.0 must be below high = 2.0"),
        (
            "rollout.stop=[13]",
            "13 is not a stop string, expected a string of at least one character; use stop_token_ids",
        ),
        ("runtime.profile_steps=3", "runtime.profile_steps = 3: expected a list, such as [3]"),
        (
            "model.lora.target_modules=q_proj",
            "model.lora.target_modules = 'q_proj': expected a list, such as ['q_proj']",
        ),
        (
            "data.chat_template_kwargs={a=[1]}",
            "data.chat_template_kwargs.a = [1]: expected a truth value, a number or a string",
        ),
        ("rollout.temperature=0", "all samples of a prompt would be the same greedy response; set it above 0"),
        ("rollout.temperature=-1", "rollout.temperature = -1: Input should be greater than 0"),
        ("rollout.stop=['.', '']", "'' is not a stop string"),
        ("rollout.stop_token_ids=[-1]", "Input should be greater than or equal to 0"),
        ("rollout.min_p=1", "rollout.min_p = 1: Input should be less than 1"),
        ("rollout={kind='vllm', router_replay=true}", "experts that the engine chose, which the protocol of engines"),
        (
            "optim.implementation=8bit",
            "were removed in 0.3; set optim.offload = true to keep moments in host memory, or",
        ),
        ("rollout.speculative.num_tokens=2", "rollout.speculative was removed in 0.3: leave it out"),
        ("rollout.cache_bytes=9", "unknown key rollout.cache_bytes"),
        ("runtime.max_staleness=9", "runtime.max_staleness = 9: Input should be less than or equal to 8"),
        ("runtime.max_staleness=1", 'set correction.kind = "truncated" (or "masked"), or runtime.max_staleness = 0'),
        ("runtime.profile_steps=[9999]", "runtime.profile_steps = [9999] names [9999], but with steps = "),
        (
            "reward={kind='weighted', parts={a={weigth=1, reward={kind='exact'}}}}",
            "unknown key reward.parts.a.weigth; did you mean 'weight'? allowed here: reward, weight",
        ),
        (
            "reward={kind='weighted', parts={exact={reward={kind='exact', foo=1}}}}",
            "unknown key reward.parts.exact.reward.foo; allowed here: kind, max_failure_fraction",
        ),
        (
            "reward={kind='weighted', parts={a={reward={kind='x'}}}}",
            "reward.parts.a.reward.kind = 'x': expected one of",
        ),
        ("environment={kind='tools', tools=['a:b'], tool=1}", "unknown key environment.tool; did you mean 'tools'?"),
        ("environment.kind=tools", "missing key environment.tools"),
        ("environment={kind='tools', tools=[]}", "environment.tools = []: "),
        (
            "environment={kind='class', path='bad.X'}",
            "environment.path = 'bad.X': expected module:name, such as my_env:Game",
        ),
        ("environment={kind='tools', tools=['a:b', 'bad.X']}", "environment.tools.1 = 'bad.X': expected module:name, "),
        ("reward={kind='function', path='bad.X'}", "reward.path = 'bad.X': expected module:name, "),
        ("reward.kind=judge_model", 'reward: kind = "judge_model" was removed (the Sluice that wrote them reads '),
        (
            "reward={kind='weighted', parts={a={reward={kind='judge_model', path='Qwen/Qwen3-8B'}}}}",
            'serve the judge, as by `vllm serve Qwen/Qwen3-8B`, and set kind = "judge" with url and model',
        ),
        ("monitors=[{project='p'}]", "missing key monitors.0.kind"),
        ("monitors=[{kind='wandb', project='p', mod='offline'}]", "unknown key monitors.0.mod; did you mean 'mode'?"),
        ("monitors=[{kind='wandb'}]", "missing key monitors.0.project"),
        ("overlong.penalty=-1", "overlong.penalty = -1: Input should be greater than or equal to 0"),
    ],
)
def test_errors_name_the_key_the_value_and_the_allowed_ones(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("store.kind=shared", 'store.kind is not durable; set store.kind = "tiered", or set runtime.max_staleness = 1'),
        ("store.keep_steps=0", "store.keep_steps = 0; set it to 1 or more"),
        ("rollout.dynamic_sampling.max_rounds=2", "rollout.dynamic_sampling replaces groups of a whole step"),
        ("rollout.stop=['.']", "rollout.stop may be cut between two parts; use rollout.stop_token_ids"),
        ("rollout={top_k=9, sampling_mask=true}", "rollout.sampling_mask needs whole responses; set it to false"),
        ("rollout.router_replay=true", "rollout.router_replay needs whole responses; set it to false"),
        ("rollout.max_response_tokens=2", "rollout.max_response_tokens = 2 can't be split into 3 parts; raise it"),
    ],
)
def test_what_can_not_be_sampled_in_parts_is_rejected(path: Path, change: str, problem: str) -> None:
    load_config(path, ["runtime.max_staleness=3", "correction.kind=truncated"])
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["runtime.max_staleness=3", "correction.kind=truncated", change])
    assert f"samples responses in 3 parts, over several steps, but {problem}" in str(caught.value)


def test_a_sampling_mask_is_without_teachers(path: Path) -> None:
    masked = ["rollout.sampling_mask=true", "rollout.top_p=0.9"]
    assert load_config(path, [*masked, "environment={kind='tools', tools=['a:b']}"]).rollout.sampling_mask
    with pytest.raises(ConfigError, match="teachers score over all tokens: remove distillation"):
        load_config(path, [*masked, "distillation.teachers={a={path='b'}}"])


def test_muon_is_not_for_adapters(path: Path) -> None:
    assert load_config(path, ["optim.kind=muon"]).optim.momentum == 0.95
    with pytest.raises(ConfigError, match=r'set optim\.kind = "adamw", or leave model\.lora out'):
        load_config(path, ["optim.kind=muon", "model.lora.rank=2"])


def test_losses_that_select_by_covariance_need_bounds_in_order_and_an_effect(path: Path) -> None:
    assert load_config(path, ["loss.kind=clip_cov", "loss.cov_low=-1"]).scores_behavior
    two = ["loss.kind=kl_cov", "optim.updates_per_step=2"]
    assert load_config(path, two).loss.share == 2e-4  # type: ignore[union-attr]
    for changes, problem in (
        (["loss.kind=kl_cov"], "set optim.updates_per_step to 2 or more"),
        ([*two, "loss.behavior=recompute"], "loss.behavior"),
        ([*two, "loss.share=0"], "loss.share"),
        ([*two, "loss.kl_coef=0"], "loss.kl_coef"),
        ([*two, "distillation={teachers={big={path='t'}}, divergence='js'}"], "raise that weight, or choose another"),
        (["loss.kind=clip_cov", "loss.share=1.1"], "loss.share"),
        (["loss.kind=clip_cov", "loss.cov_low=5"], "cov_low = 5.0 must be below cov_high = 5.0"),
        (["loss.kind=clip_cov", "loss.cov_high=inf"], "loss.cov_high"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path, changes)
        assert problem in str(caught.value)


REUSE = ("correction.kind=truncated", "data.reuse.num_groups=2")
OWN = (*REUSE, "data.reuse.max_age=3", "store.keep_steps=9")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ((*OWN, "correction.kind=none"), 'without a correction; set correction.kind = "truncated" (or "masked")'),
        ((*OWN, "store.kind=shared", "store.keep_steps=0"), 'store.kind = "shared" keeps none'),
        ((*OWN, "store.keep_steps=4", "checkpoint.every_steps=2"), "store.keep_steps of at least 5, not 4: max_age"),
        ((*OWN, "store.keep_bytes=9"), "store.keep_bytes may remove steps that data.reuse takes groups from"),
        ((*OWN, "data.reuse.max_age=1", "runtime.max_staleness=1"), "leaves no step to take groups from"),
        ((*OWN, "data.reuse.steps=[0,2]"), "need data.reuse.max_age, and no data.reuse.steps"),
        ((*OWN, "data.reuse.run=other"), "groups of run other need data.reuse.steps"),
        ((*REUSE, "data.reuse.run=other", "data.reuse.steps=[2,2]"), "[2, 2] is empty; give the first step"),
        (REUSE, "groups of the run's own steps need data.reuse.max_age"),
    ],
)
def test_groups_that_can_not_be_reused_exactly_are_rejected(path: Path, changes: tuple[str, ...], problem: str) -> None:
    assert load_config(path, [*OWN, "runtime.max_staleness=1"]).steps_kept_for_reuse == 4
    assert load_config(path, [*REUSE, "data.reuse.run=r", "data.reuse.steps=[0,2]"]).steps_kept_for_reuse == 0
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(changes))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.chat_template_kwargs.thinking=False", False),
        ("data.chat_template_kwargs.thinking=true", True),
        ("data.chat_template_kwargs.effort=.5", 0.5),
        ('data.chat_template_kwargs.effort="off"', "off"),
        ("data.chat_template_kwargs.day=2024-01-01", "2024-01-01"),
        ("data.chat_template_kwargs={'thinking': False}", {"thinking": False}),
        ("data.shuffle=False", False),
        ("optim.betas=(0.8, .9)", (0.8, 0.9)),
        ("steps=1e2", 100),
        ("model.lora=None", None),
        ("rollout.dynamic_sampling=null", None),
        ("services.ray_address=None", None),
        ("data.eval_path=None", None),
        ("data.eval_path=", None),
        ("name=2024", "2024"),
        ("note=true", "true"),
        ("note=None", "None"),
        ("note=a\nsteps = 3", "a\nsteps = 3"),
        ("note='a' and 'b'", "'a' and 'b'"),
        ('note="it\'s 5"', "it's 5"),
        ("data.train_path=123", "123"),
        ("data.train_path=2024-01-01", "2024-01-01"),
        ("model.path=nan", "nan"),
    ],
)
def test_an_override_is_read_by_the_type_of_its_key(path: Path, override: str, expected: object) -> None:
    value: object = load_config(path, [override])
    for part in override.partition("=")[0].split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.chat_template_kwargs.thinking=off",
            "off would be a text, which counts as true; write true or false, or",
        ),
        ("data.chat_template_kwargs.thinking=FALSE", "FALSE would be a text, which counts as true"),
        (
            'data.chat_template_kwargs.thinking="False"',
            "a template takes any text for true; write false without quotes",
        ),
        (
            "data.chat_template_kwargs.thinking=None",
            "thinking = None: expected a truth value, a number or a string; to",
        ),
        ("data.chat_template_kwargs.x=inf", "data.chat_template_kwargs.x = inf: expected a finite number"),
        ("data.chat_template_kwargs={thinking=False}", "is neither TOML, JSON nor Python; put text into quotes"),
        ("environment={kind='class', path='a:B', arguments={day=2024-01-01}}", "date is not JSON serializable"),
        (
            "environment={kind='class', path='a:B', arguments={x=inf}}",
            "environment.arguments: expected text, finite numbers,",
        ),
        ("rollout.stop_token_ids=[true]", "rollout.stop_token_ids = [True]: expected a number, not a truth value"),
        ("data.shuffle=yes", "data.shuffle = 'yes': expected true or false"),
        ("model={path=2024}", "model.path = 2024: expected text; put it into quotes"),
        ("data={train_path=false}", "data.train_path = False: expected text; put it into quotes"),
        ("approval.when=['kl > nan']", "approval.when.0.value = 'nan': expected a finite number"),
    ],
)
def test_what_a_value_can_not_mean_is_rejected(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, set[object]]]:
    """Yield the fields of a config's class and of the classes in it, each with the types that it may have."""
    for name, field in model.model_fields.items():
        types = set(union_members(field.annotation))
        yield f"{model.__name__}.{name}", field, types
        for each in types | {inner for outer in types for inner in union_members((get_args(outer) or [outer])[-1])}:
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from fields_of(each)


def with_default(field: FieldInfo) -> FieldInfo:
    """Return a field that need not be given."""
    optional = copy(field)
    if optional.is_required():
        optional.default = None
    return optional


def test_numbers_truth_values_and_text_are_told_apart_in_every_section() -> None:
    wrong: dict[object, list[object]] = {int: [True], float: [True, math.inf, -math.inf, math.nan], bool: [0, 1]}
    found = fields_of(RunConfig)
    fields = {name.replace(".", "_"): (field, types) for name, field, types in found if types & wrong.keys()}
    optional = {name: (cast(Any, field.annotation), with_default(field)) for name, (field, _) in fields.items()}
    every = create_model("Every", __base__=FrozenConfig, **optional)
    for name, (_, types) in fields.items():
        for value in (value for scalar in types & wrong.keys() for value in wrong[scalar]):
            if name.endswith("Reward_timeout_seconds") and value == math.inf:  # no limit
                continue
            with pytest.raises(ValidationError) as caught:
                every.model_validate({name: value})
            assert name in {error["loc"][0] for error in caught.value.errors()}, value
    assert fields.keys() >= {"RunConfig_steps", "EvalConfig_accuracy_threshold", "KlConfig_in_reward"}


def test_a_file_may_begin_with_a_byte_order_mark(path: Path) -> None:
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert load_config(path).steps == 3
    path.write_text(MINIMAL + "\n[optim]\nwarmup_updates = " + "9" * 5000)
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(path)


def test_every_section_names_its_kinds_if_another_one_is_given(path: Path) -> None:
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    unions = {
        name: annotation
        for name, annotation in annotations.items()
        if isinstance(annotation, UnionType) and NoneType not in get_args(annotation)
    }
    assert unions.keys() == {"reward", "rollout", "advantage", "loss", "correction", "store"}
    for section, union in unions.items():
        kinds = ", ".join(map(repr, kinds_of(union)))
        with pytest.raises(ConfigError, match=f"{section}.kind = 'none_of_them': expected one of {kinds}$"):
            load_config(path, [f"{section}.kind=none_of_them"])


def test_a_section_without_a_kind_has_the_default_kind(path: Path) -> None:
    config = load_config(path, ["loss.clip_high=0.28", "advantage.epsilon=1e-8", "correction.cap=3.0"])
    assert (config.loss.kind, config.advantage.kind, config.correction.kind) == ("clipped", "grpo", "truncated")
    # Without the section there is no correction.
    assert load_config(path).correction.kind == "none"
    assert load_config(path, ["loss.kind=gspo"]).loss.aggregation == "seq_mean_token_mean"


@pytest.mark.parametrize("kept", [0, 7, "all"])
def test_kept_steps_are_a_number_or_all(path: Path, kept: int | str) -> None:
    config = load_config(path, [f"store.keep_steps={kept}"])
    assert config.store.keep_steps == kept
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("kept", ["-1", "true", "some", "1.5"])
def test_other_numbers_of_kept_steps_are_rejected(path: Path, kept: str) -> None:
    with pytest.raises(ConfigError, match=r"store.keep_steps = .*: expected a number of steps, 0 or more, or 'all'$"):
        load_config(path, [f"store.keep_steps={kept}"])


def test_the_version_that_samples_a_step(path: Path) -> None:
    config = load_config(path)
    assert [config.sampler_version(step) for step in range(3)] == [0, 1, 2]
    stale = load_config(path, ["runtime.max_staleness=1", "correction.kind=truncated"])
    assert [stale.sampler_version(step) for step in range(4)] == [0, 0, 1, 2]


def test_prompts_per_generated_batch(path: Path) -> None:
    for overrides, expected in (
        ((), 16),
        (("rollout.num_workers=3",), 6),  # one shard for each worker, rounded up
        (("rollout.num_workers=3", "rollout.batch_prompts=2"), 2),
    ):
        assert load_config(path, overrides).rollout.prompts_per_batch == expected


def test_a_missing_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml does not exist"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"can't be read: .*line 1"):
        load_config(broken)


def test_the_built_in_configs_are_valid() -> None:
    paths = list((Path(__file__).parents[3] / "flows" / "configs").glob("*.toml"))
    assert paths
    for path in paths:
        assert load_config(path).steps > 0


def test_different_configs_have_different_digests(path: Path) -> None:
    assert load_config(path).digest == load_config(path).digest
    assert load_config(path).digest != load_config(path, ["seed=1"]).digest


def test_importing_the_schemas_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'prefect', 'numpy', 'pyarrow', 'transformers'}"
    code = f"import sys, schemas.config.load, schemas.step; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
