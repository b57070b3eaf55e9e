"""`sluice plan`: what a step of a config takes, and what of it can't fit, with nothing started."""

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from flows.plan.footprint import (
    SimulatedStep,
    column_bytes,
    column_dtypes,
    draw_lengths,
    measure_step,
    simulate_step,
)
from flows.preflight import check
from flows.ui.progress import variance_warning
from infra.datasets import load_prompts
from infra.engines.base import Generation, TokenExperts
from infra.models.load import load_tokenizer
from infra.models.tiny import CHAT_TEMPLATE
from infra.workers.samples import Sample, to_columns
from infra.workers.sampling import ScoredResponse
from rl_core.columns.codec import encoded_bytes
from rl_core.columns.jagged import is_jagged
from rl_core.columns.prompts import share_prompts
from rl_core.rewards import RewardOutcome
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.plan import ForwardPlan, StepPlan
from schemas.step import StepReport
from tests.support.command import Command, Result, assert_rejected, make_command
from tests.support.programs import PRELUDE
from tests.support.tiny import make_tiny_moe, tiny_row, write_rows
from tests.support.workplace import WITH_REFERENCE, Workplace

GAMES = ("Game", "Broken", "Wordy")
GAME = """
class Game:
    def __init__(self, task, seed): ...
    def reset(self): ...
    def step(self, action): return "", 1.0, True

class Broken(Game):
    def reset(self): raise ValueError("no such game:\\n7")

class Wordy(Game):
    def reset(self): return "x" * 1_000_000
"""
VOCAB_SIZE = 300  # fits uint16, as the tiny model's does


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Workplace(tmp_path_factory.mktemp("plan"), config=WITH_REFERENCE).folder


@pytest.fixture
def sluice(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that calls `sluice plan tiny.toml` in the folder."""
    monkeypatch.chdir(folder)
    return partial(make_command(monkeypatch, capsys), "plan", "tiny.toml")


@pytest.fixture
def load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Read the folder's config, with overrides."""
    monkeypatch.chdir(folder)
    return lambda *overrides: load_config(Path("tiny.toml"), overrides)


def planned(result: Result) -> dict[str, Any]:
    """The JSON value of a command that succeeded."""
    code, out, err = result
    assert (code, err) == (0, "")
    value: dict[str, Any] = json.loads(out)["footprint"]
    return value


def test_a_full_step_in_numbers(sluice: Command) -> None:
    arguments = ("runtime.num_policy_ranks=2", "optim.updates_per_step=2", "packing.token_budget=44")
    value = planned(sluice(*arguments, "--fill", "1", "--json"))
    # Four prompts of 9 tokens, four times each; every response has the most tokens, 12: 16 rows of 21 tokens.
    assert (value["num_rows"], value["prompt_tokens"], value["response_tokens"]) == (16, 144, 192)
    assert value["padded_tokens"] == 16 * 21
    assert value["warnings"] == []
    plan = StepPlan.model_validate(value["plan"])
    assert [(update.num_loss_tokens, update.num_live_sequences) for update in plan.updates] == [(96, 8), (96, 8)]
    # Four rows for each rank, two to a micro-batch of 44.
    assert [[[len(micro.rows) for micro in rank] for rank in update.ranks] for update in plan.updates] == [
        [[2, 2], [2, 2]]
    ] * 2
    # Two samples of a prompt of 9 tokens go into one, so that it is computed for half of them only.
    assert [update.num_tokens for update in plan.updates] == [8 * 12 + 4 * 9] * 2
    forward = ForwardPlan.model_validate(value["forward"])
    assert (len(forward.ranks), forward.num_micros, forward.num_tokens) == (2, 4, 264)
    # ids: uint16, of a prompt once, and 17 offsets of 8 bytes; the mask: a bit each; log-probs: float32.
    num_bytes = {column["name"]: column["num_bytes"] for column in value["columns"]}
    assert num_bytes["prompt_ids"] == 2 * 144 // 4 + 17 * 8
    assert num_bytes["loss_mask"] == 192 / 8 + 17 * 8
    assert num_bytes["reference_logprobs"] == num_bytes["behavior_logprobs"] == 4 * 192 + 17 * 8
    assert value["store_bytes"] == value["most_store_bytes"] == sum(num_bytes.values()) + value["chunk_bytes"]


def test_people_see_plans_columns_bytes_and_warnings(sluice: Command) -> None:
    code, out, err = sluice("runtime.num_policy_ranks=3", "optim.updates_per_step=8", "--fill", "0.25")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "run tiny: 4 steps; advantage grpo, loss clipped, correction none, 0.01 x KL (k3) in the loss"
    assert any(line.startswith("one step: 16 rows, 144 prompt tokens (at most 9 a row), ") for line in lines)
    assert "updates: token budget 8,192, seed 0, 0 rows skipped" in lines
    assert "update ranks micro-batches rows tokens fill dummies imbalance loss tokens sequences" in lines
    assert sum(line.split()[1:4] == ["3", "1", "2"] for line in lines) == 8  # three ranks, one micro-batch, two rows
    assert any(line.startswith("columns: 16, of ") for line in lines)
    assert any(line.startswith("store columns of a step ") and " 1 GiB " in line for line in lines)
    assert (
        "warning: runtime.num_policy_ranks = 3, but an update has 2 rows: the other ranks (1) process only dummies; "
        "lower it to that, or lower optim.updates_per_step"
    ) in lines
    assert "process only dummies" not in sluice("runtime.num_policy_ranks=2", "optim.updates_per_step=8")[1]
    assert "process only dummies" not in sluice("runtime.num_policy_ranks=3", "optim.updates_per_step=5")[1]
    many = sluice("optim.updates_per_step=20")[1]
    assert "optim.updates_per_step = 20, but there are only enough rows for 16; lower it to that" in many
    assert "warning" not in sluice("optim.updates_per_step=16")[1]


def test_the_first_line_names_the_whole_method(sluice: Command) -> None:
    def first(*settings: str) -> str:
        code, out, err = sluice(*settings)
        assert (code, err) == (0, "")
        return out.splitlines()[0]

    changed = ("advantage.kind=rloo", "loss.kind=dppo", "correction.kind=rejected", "kl.estimator=k1")
    assert first(*changed, "kl.in_reward=true", "rollout.sampling_mask=true", "rollout.top_p=0.9") == (
        "run tiny: 4 steps; advantage rloo, loss dppo, correction rejected, 0.01 x KL (k1) subtracted from the reward, "
        "scores over the sampling mask"
    )
    covariance = first("loss.kind=kl_cov", "optim.updates_per_step=2")
    assert covariance.startswith("run tiny: 4 steps; advantage grpo, loss kl_cov, correction none")
    assert first("kl.coef=0", "optim.kind=muon") == (
        "run tiny: 4 steps; advantage grpo, loss clipped, correction none, optimizer Muon"
    )


def test_it_says_what_is_learned_from_whom(sluice: Command) -> None:
    hint = "distillation.teachers.own={prompt='{prompt} The answer is {answer}.'}"
    printed = sluice("distillation.teachers.big={path='model', data_sources=['tiny', 'games']}", hint)[1]
    assert (
        "\ndistillation: on-policy, reverse KL of the sampled tokens; advantage of a token: 1 x (teacher's - policy's "
        "log-prob); the reward is only reported\nteacher big of data source tiny, games: model\n"
        "teacher own of all other sources: the policy itself; reads '{prompt} The answer is {answer}.'\n"
    ) in printed
    top = ("distillation.divergence=js", "distillation.top_k=7", "distillation.weight=0.5")
    printed = sluice("distillation.teachers.big={path='model'}", *top, "distillation.reward_weight=2")[1]
    assert (
        "\ndistillation: on-policy, js over a teacher's 7 most likely tokens; loss of a token: 0.5 x that + 2 x that "
        "of the reward\nteacher big of all rows: model\n"
    ) in printed


def test_a_prompt_that_samples_share_counts_once(sluice: Command) -> None:
    # Of four samples of each of four prompts of 9 tokens, three share it: 16 rows of 21 tokens.
    assert "prompts shared: 108 of 336 tokens are not computed again" in sluice("--fill", "1")[1]
    apart = sluice("packing.share_prompts=false")[1]
    assert "each sample's prompt is computed for itself: packing.share_prompts is false" in apart
    code, _, err = sluice("packing.share_prompts=true", "packing.kind=padded")
    assert code == 2
    assert 'packing.share_prompts = true, but samples can\'t share a prompt: packing.kind is "padded"' in err


def test_a_plan_is_one_screen(sluice: Command) -> None:
    lines = sluice("runtime.num_policy_ranks=2", "--cluster", "4xH100")[1].splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 160
    assert lines[-1].startswith("the run fits 1x4xH100: host memory (node 0, ")
    assert " binds first, at " in lines[-1]


@pytest.mark.parametrize("option", ["--calibrate", "--utilization", "--lengths"])
def test_options_of_guessed_times_and_lengths_are_gone(sluice: Command, option: str) -> None:
    code, _, err = sluice(option)
    assert code == 2
    assert f"No such option: {option}" in err


def test_people_see_a_prompt_and_what_the_reward_gives_to_its_answer(folder: Path, sluice: Command) -> None:
    (folder / "other_rewards.py").write_text(
        "def bad(prompt, completion, answer, info):\n    raise ValueError('no')\n"
        "def rank(prompt, completions, answer, info):\n    return [{'reward': 0.5, 'n': len(completions)}] * 4\n"
    )
    exact = "reward={kind='exact'}"
    example = json.loads(sluice(exact, "--json")[1])["example"]
    assert (example["num_rows"], example["reward"], len(example["tokens"])) == (12, 1.0, 9)
    assert example["prompt"] == "".join(example["tokens"])
    code, out, _ = sluice(exact, "rollout.num_prompts=20")
    assert code == 0
    assert "data: 12 training prompts\n" in out
    assert f"as the model sees it: {example['prompt']!r}\nits 9 tokens: {example['tokens'][0]!r} " in out
    assert f"reward of its answer, {example['answer']!r}, as the whole response: 1\n" in out
    rank = sluice("reward={kind='group_function', path='other_rewards:rank'}")[1]
    assert "as the whole response: 0.5, n 4\n" in rank
    bad = "reward={kind='function', path='other_rewards:bad', num_processes=0, timeout_seconds=inf}"
    assert "as the whole response: failed: ValueError: no\n" in sluice(bad)[1]


@pytest.mark.parametrize(
    "reward",
    ["{kind='math'}", "{kind='weighted', parts={a={reward={kind='math'}}, b={reward={kind='exact'}, weight=0}}}"],
)
def test_the_answer_of_math_is_scored_as_an_expression(sluice: Command, folder: Path, reward: str) -> None:
    pytest.importorskip("math_verify")
    path = write_rows(folder / "expressions.jsonl", [tiny_row(0) | {"reward_model": {"ground_truth": "x+1"}}])
    out = sluice(f"data.train_path={path}", f"reward={reward}")[1]
    assert "reward of its answer, 'x+1', as the whole response, '\\\\boxed{x+1}': 1" in out


def test_fewer_prompts_than_a_step_takes_are_a_warning(
    load: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tiny_rewards", raising=False)  # it may be another folder's
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.cwd())])  # last, as commands do
    check(load())
    assert "fewer than" not in caplog.text
    check(load("rollout.num_prompts=20"))
    assert "data has 12 training prompts, fewer than rollout.num_prompts = 20: a step repeats some" in caplog.text


def test_a_template_that_does_not_begin_the_models_turn_is_a_warning(
    folder: Path,
    tmp_path: Path,
    load: Callable[..., RunConfig],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "tiny_rewards", raising=False)  # it may be another folder's
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE.split("{% if add_generation_prompt %}")[0])
    check(load())
    assert "generation prompt" not in caplog.text
    check(load(f"model.path={model}"))
    assert "writes no generation prompt: prompts lack '<|assistant|>'" in caplog.text


def test_first_steps_without_variance_are_a_warning() -> None:
    def steps(*variances: float) -> list[StepReport]:
        metrics = [{"groups/zero_variance": each, "reward": 0.0} for each in variances]
        return [
            StepReport(step=step, policy_version=step + 1, metrics=each, seconds=1.0, seconds_by_phase={})
            for step, each in enumerate(metrics)
        ]

    assert variance_warning([], "r") is None
    assert variance_warning(steps(1, 1, 0.75), "r") is None
    warning = variance_warning(steps(1, 1, 1), "r")
    assert warning is not None
    assert warning.startswith("all groups of the first 3 steps have zero variance: ")
    assert "(mean 0.000)" in warning
    assert "`sluice inspect r`" in warning


def test_the_same_config_gives_the_same_plan(sluice: Command) -> None:
    first, second = planned(sluice("--json")), planned(sluice("--json"))
    assert first == second
    assert planned(sluice("seed=1", "--json"))["plan"] != first["plan"]


def test_what_can_not_fit_is_rejected(sluice: Command) -> None:
    assert_rejected(sluice("packing.token_budget=16"), "packing.token_budget = 16", "at least 22")
    assert_rejected(
        sluice("rollout.max_response_tokens=600", "packing.token_budget=9000"), "512 positions of the model"
    )
    assert_rejected(
        sluice("--fill", "0"), "fill is 0.0, expected a fraction of rollout.max_response_tokens above 0 and at most 1"
    )
    assert_rejected(sluice("model.path=./nowhere"), "./nowhere", "no such folder")


def test_a_step_over_the_stores_capacity_is_shown_and_rejected(sluice: Command) -> None:
    result = sluice("store.capacity_bytes=2000", "--json")
    assert_rejected(result, "one step take", "more than store.capacity_bytes = 2000", "lower rollout.num_prompts")
    footprint = json.loads(result[1])["footprint"]
    assert footprint["store_bytes"] > 2000
    enough = footprint["most_store_bytes"]
    assert f"set it to at least {enough}," in result.err
    assert planned(sluice(f"store.capacity_bytes={enough}", "--json"))["warnings"] == []


def test_a_store_that_long_responses_would_fill_is_a_warning(load: Callable[..., RunConfig]) -> None:
    footprint = measure_step(load(), fill=0.1)
    assert measure_step(load(f"store.capacity_bytes={footprint.most_store_bytes}"), fill=0.1).warnings == ()
    room = (footprint.store_bytes + footprint.most_store_bytes) // 2
    tight = measure_step(load(f"store.capacity_bytes={room}"), fill=0.1)
    tight.check_capacity()
    assert tight.warnings == (
        f"with every response of 12 tokens the columns of one step take {footprint.most_store_bytes} bytes, more than "
        f"store.capacity_bytes = {room}; set it to that",
    )


def test_responses_under_way_take_room_in_the_store(load: Callable[..., RunConfig]) -> None:
    whole, parts = (
        measure_step(load("correction.kind=truncated", f"runtime.max_staleness={steps}"), fill=1.0) for steps in (1, 4)
    )
    # Of 12 tokens, responses have at most 9, 6 and 3 three steps, two and one before their own is finished.
    assert parts.partial_bytes == 2 * parts.num_rows * (9 + 6 + 3) * (4 + 4 + 4)
    rest = parts.most_store_bytes - whole.most_store_bytes - parts.partial_bytes
    versions = next(each.num_bytes for each in parts.columns if each.name == "sampler_versions")
    assert rest == versions + parts.chunk_bytes - whole.chunk_bytes


@pytest.mark.parametrize("experts", [0, 2 * 2])  # of a token: without and with router replay
def test_column_bytes_are_those_of_what_workers_put(folder: Path, load: Callable[..., RunConfig], experts: int) -> None:
    config = load("model.path=moe", "rollout.router_replay=true") if experts else load()
    make_tiny_moe(folder / "moe")
    draw = simulate_step(config, 0.5)
    columns = share_prompts(to_columns(samples_of(draw, experts), 0, VOCAB_SIZE, []))
    dtypes = column_dtypes(config, VOCAB_SIZE)
    assert dtypes.get("response_experts") == ("uint8[4]" if experts else None)
    assert set(dtypes) - set(columns.schema.names) == {"reference_logprobs", "advantages"}
    every = set(column_dtypes(config.replace(loss=config.loss.replace(behavior="recompute")), VOCAB_SIZE))
    assert every - set(dtypes) == {"behavior_logprobs"}
    ours = {column.name: column.num_bytes for column in column_bytes(draw, dtypes)}
    for name in set(columns.schema.names) - {"response_text"}:  # no text is drawn
        assert ours[name] == plain_bytes(columns[name]), name
    names = [name for name in columns.schema.names if name != "response_text"]
    payload, buffers = sum(ours[name] for name in names), 3 * len(names)
    empty = encoded_bytes(columns.select(names).slice(0, 0))
    assert abs(encoded_bytes(columns.select(names)) - payload - empty) <= 64 * buffers  # what they are padded to


def plain_bytes(column: pa.Array) -> int:
    """The bytes of a column's values and row offsets; Arrow's own `nbytes` leaves out some offsets and bits."""
    if pa.types.is_string(column.type):
        return int(pc.binary_length(column).to_numpy().sum()) + 4 * (len(column) + 1)
    return int(column.offsets.nbytes + column.values.nbytes if is_jagged(column) else column.nbytes)


def samples_of(draw: SimulatedStep, experts: int) -> list[Sample]:
    """Generations of the drawn lengths."""
    samples = []
    for row, (prompt, length) in enumerate(zip(draw.prompts, draw.response_lengths.tolist(), strict=True)):
        group, sample = divmod(row, draw.samples_per_prompt)
        reason = "length" if length == draw.max_response_tokens else "stop"
        chosen = TokenExperts(*(np.zeros((size, experts), np.uint8) for size in (len(prompt.prompt_ids), length)))
        logprobs = np.zeros(length, dtype=np.float32)
        ids = np.ones(length, dtype=np.int32)
        generation = Generation(ids, logprobs, reason, experts=chosen if experts else None)
        response = ScoredResponse(generation, "", "", RewardOutcome(reward=0.5))
        samples.append(Sample(f"0-{group}-{sample}", group, prompt, response))
    return samples


def test_no_reference_column_without_kl(load: Callable[..., RunConfig]) -> None:
    assert "reference_logprobs" in column_dtypes(load(), VOCAB_SIZE)
    assert "reference_logprobs" not in column_dtypes(load("kl.coef=0"), VOCAB_SIZE)
    assert column_dtypes(load(), 2**17)["response_ids"] == "int32"


@pytest.mark.parametrize("fill", [0.001, 0.3, 0.5, 0.8, 1.0])
def test_drawn_lengths(fill: float) -> None:
    lengths = draw_lengths(np.random.default_rng(0), fill, 1000, 4000)
    assert lengths.min() >= 1
    assert lengths.max() <= 1000
    assert abs(lengths.mean() - max(fill * 1000, 1)) < 20
    assert (lengths == draw_lengths(np.random.default_rng(0), fill, 1000, 4000)).all()
    if fill == 1:
        assert (lengths == 1000).all()


@pytest.mark.parametrize("fill", [0.0, -0.5, 1.01, float("nan")])
def test_a_fill_that_is_no_share_is_rejected(fill: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        draw_lengths(np.random.default_rng(0), fill, 10, 1)


def test_prompts_are_those_of_the_first_step(load: Callable[..., RunConfig]) -> None:
    config = load()
    data = load_prompts(config.data.train_path, config.data, load_tokenizer(config.model))
    rows = data.rows_for_step(0, 4, config.seed, config.data.shuffle)
    expected = [data[row].prompt_text for row in rows for _ in range(4)]
    assert [prompt.prompt_text for prompt in simulate_step(config, 0.5).prompts] == expected


def test_a_curriculum_begins_with_as_many_prompts_of_each_level(load: Callable[..., RunConfig]) -> None:
    levels = ("data.curriculum.kind=levels", "data.curriculum.field=index", "data.curriculum.starts=[0,9]")
    prompts = simulate_step(load(*levels), 0.5).prompts[::4]  # 9 and 3 rows
    assert [prompt.info["index"] >= 9 for prompt in prompts] == [False, True, False, True]


def test_stored_groups_are_rows_that_are_not_generated(load: Callable[..., RunConfig], sluice: Command) -> None:
    reuse = ("correction.kind=truncated", "data.reuse.num_groups=2", "data.reuse.max_age=1", "store.keep_steps=2")
    value = planned(sluice(*reuse, "--json"))
    assert (value["num_rows"], value["num_reused"]) == (4 * 4 + 2 * 4, 2 * 4)
    assert "one step: 24 rows (8 of stored groups), " in sluice(*reuse)[1]
    step, own = (simulate_step(load(*changes), 0.5) for changes in (reuse, ()))
    texts = [[prompt.prompt_text for prompt in each.prompts] for each in (step, own)]
    assert texts[0][: len(texts[1])] == texts[1]
    other = (*reuse[:2], "data.reuse.run=earlier", "data.reuse.steps=[0,2]")
    assert_rejected(sluice(*other), "no run 'earlier'")


def test_the_environments_of_all_sources_are_tried(folder: Path, sluice: Command) -> None:
    (folder / "board_games.py").write_text(GAME)
    game, broken, wordy = (
        f'{{path="train.parquet", environment={{kind="class", path="board_games:{name}"}}}}' for name in GAMES
    )
    mixed = ("data.train_path=", "data.eval_path=")
    assert planned(sluice(*mixed, f"data.sources=[{game}]", "--json"))["num_rows"] == 16
    assert (
        "environment: class board_games:Game; at most 8 turns of at most 6 tokens; 2 processes per rollout worker; at "
        "most 60 s a reset, 0.5 s a step, 600 s a trajectory\n"
    ) in sluice(*mixed, f"data.sources=[{game[:-2]}, max_turn_tokens=6, step_timeout_seconds=0.5}}}}]")[1]
    begins = "can't begin with its first training prompt: reset: "
    result = sluice(*mixed, f"data.sources=[{game}, {broken}]")
    assert_rejected(result, f"environment class board_games:Broken {begins}ValueError: no such game: 7 (")
    result = sluice(*mixed, f"data.sources=[{game}, {wordy}]")
    assert_rejected(
        result, f"environment class board_games:Wordy {begins}the prompt has ", "more than data.max_prompt_tokens"
    )


def test_a_program_is_tried(folder: Path, sluice: Command) -> None:
    (folder / "agent.py").write_text(PRELUDE + "ask()")
    (folder / "ended.py").write_text("raise SystemExit('no such game')")

    def planned_with(file: str, **settings: str) -> Result:
        command = f'command=["{{python}}", "{{workdir}}/{file}"]'
        more = "".join(f', {name}="{value}"' for name, value in settings.items())
        return sluice(f'environment={{kind="program", {command}{more}}}')

    code, out, _ = planned_with("agent.py")
    assert code == 0
    assert "environment: program {python} {workdir}/agent.py; at most 8 turns; 2 processes per" in out
    begins = "can't begin with its first training prompt: reset: "
    assert_rejected(planned_with("ended.py"), begins, "exit code 1 before it asked", "stderr ends with: no such game")
    assert_rejected(planned_with("agent.py", grader="none:grade"), begins, "environment.grader 'none:grade': importing")
    assert_rejected(planned_with("agent.py", python="python3"), "environment.python = 'python3' has no effect on a pro")
    result = sluice('environment={kind="program", command=["./nothing"]}')
    assert_rejected(result, f"environment.command: there is no program '{folder}/nothing' on ")
    told = 'command=["{python}", "{workdir}/agent.py", "{info.%s}"]'
    assert sluice(f'environment={{kind="program", {told % "data_source"}}}').exit_code == 0
    result = sluice(f'environment={{kind="program", {told % "level"}}}')
    assert_rejected(result, "environment.command has {info.level}, but the info of the data row", "has data_source")


def test_nothing_was_started_or_left(folder: Path) -> None:
    assert not (folder / ".sluice").exists()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "answer", "reason"),
    [
        ("numeric", "x = 3, y = 4", "has 2 numbers"),
        ("numeric", "seven", "has no finite number"),
        ("math", "", "finds no expression"),
    ],
)
def test_an_answer_that_does_not_match_itself_is_refused(
    sluice: Command, folder: Path, kind: str, answer: str, reason: str
) -> None:
    if kind == "math":
        pytest.importorskip("math_verify")
    rows = [{**tiny_row(row), "reward_model": {"ground_truth": "3/4"}} for row in range(3)]
    rows[1]["reward_model"] = {"ground_truth": answer}
    path = write_rows(folder / "answers.jsonl", rows)
    reward = f'reward={{ kind = "weighted", parts = {{ right = {{ reward = {{ kind = "{kind}" }} }} }} }}'
    assert_rejected(sluice(f"data.train_path={path}", reward), "answers.jsonl, row 2: ", repr(answer), reason)
    write_rows(path, rows[:1])
    assert sluice(f"data.train_path={path}", reward).exit_code == 0


def test_a_problem_that_its_reasoning_gym_verifier_does_not_take_is_refused(sluice: Command, folder: Path) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")

    def checked(task: str, answer: str | None = None, **changes: Any) -> Result:
        rows = []
        for number, entry in enumerate(reasoning_gym.create_dataset(task, size=2, seed=1)):
            info = {"metadata": json.dumps(entry["metadata"])}
            changed = number and answer is not None
            rows.append(tiny_row(number, data_source=task, answer=answer if changed else str(entry["answer"])))
            rows[-1] |= {"extra_info": info} | (changes if number else {})
        path = write_rows(folder / "problems.jsonl", rows)
        return sluice(f"data.train_path={path}", "data.eval_path=", 'reward={ kind = "reasoning_gym" }')

    assert checked("chain_sum").exit_code == 0
    assert checked("rubiks_cube").exit_code == 0  # any sequence of moves that solves it
    assert_rejected(checked("countdown", "seven"), "problems.jsonl, row 2: ", "'seven'", "instead of 1")
    assert_rejected(checked("chain_sum", extra_info={}), "problems.jsonl, row 2: ", "KeyError: 'metadata'")
    assert_rejected(checked("chain_sum", data_source="no_such_task"), "problems.jsonl, row 2: ", "no_such_task")


def test_tools_whose_module_ends_the_process_are_refused(sluice: Command, folder: Path) -> None:
    (folder / "deadly_tools.py").write_text("import os\nos._exit(3)\n")
    result = sluice('environment={ kind = "tools", tools = ["deadly_tools:add"] }')
    assert_rejected(result, "environment.tools 'deadly_tools:add'", "ended with exit code 3", "when they are imported")


@pytest.mark.usefixtures("sluice")
def test_answers_are_checked_within_a_deployment_whose_event_loop_runs() -> None:
    async def check_within_loop() -> int:
        return len(check(load_config(Path("tiny.toml"), ['reward={ kind = "exact" }'])))

    assert asyncio.run(check_within_loop()) > 0
