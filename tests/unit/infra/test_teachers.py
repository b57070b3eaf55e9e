"""Teachers as plain objects, on a store in memory: which rows they score, given which prompts; and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flows.plan.footprint import column_dtypes
from flows.preflight import check_run, check_teachers
from infra.datasets import load_train_prompts
from infra.datasets.teacher_prompts import TeacherPrompts
from infra.models.load import load_model, load_tokenizer
from infra.models.tiny import make_tokenizer
from infra.stores.chunk_index import MemoryStore
from infra.workers.layout import frozen_groups, teacher_workers
from infra.workers.policy import PolicyWorker
from infra.workers.rollout import RolloutWorker
from infra.workers.scoring import ScoringWorker, TeacherWorker
from rl_core.planning.plan import plan_forward, rows_by_rank
from rl_core.training.rows import TOP_COLUMNS
from rl_core.views import decode_ints, new_batch, select, with_column
from schemas.batch import BatchHandle
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError, ModelError, UserError
from schemas.step import RunHandle
from tasks.put import prompt_rows
from tests.support.configs import run_config
from tests.support.engine_checks import plain_logprobs
from tests.support.sft import CALLING
from tests.support.tiny import make_tiny_model, tiny_row, write_rows

SAMPLES = 2
HINT = "{prompt} The answer is {answer}, of row {index}."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    make_tiny_model(folder / "model")
    make_tiny_model(folder / "big", seed=7, hidden_size=32)
    make_tiny_model(folder / "other", seed=8)
    rows = [tiny_row(index, data_source=("sums", "games", "names")[index % 3]) for index in range(6)]
    write_rows(folder / "train.parquet", rows)
    return folder


def config_of(
    folder: Path, teachers: Mapping[str, Any], divergence: str = "sampled", top_k: int = 5, **fields: Any
) -> RunConfig:
    return run_config(
        folder,
        rollout={"num_prompts": 6, "samples_per_prompt": SAMPLES, "max_response_tokens": 6},
        packing={"share_prompts": True, **fields.pop("packing", {})},
        distillation={"teachers": teachers, "divergence": divergence, "top_k": top_k},
        **fields,
    )


def sampled(config: RunConfig, store: MemoryStore) -> tuple[RunHandle, BatchHandle]:
    """Roll out step 0."""
    folder = Path(config.runtime.runs_dir, "run-1")
    folder.mkdir(parents=True, exist_ok=True)
    run = RunHandle(run_id="run-1", identity="run-1", directory=str(folder), config=config, store_incarnation="g")
    store.open(0)
    rollout, groups = RolloutWorker(run, store=store), tuple(range(config.rollout.num_prompts))
    rollout.start()
    shard, stored = rollout.generate(0, 0, 0, groups), rollout.put(0, 0, 0, groups, (), 0)
    assert stored is not None
    lengths = shard.prompt_lengths, shard.response_lengths
    return run, new_batch(run.run_id, 0, 0, [stored.chunk], stored.dtypes, *lengths, prompt_rows([stored]))


def scores_of(
    worker: ScoringWorker, store: MemoryStore, batch: BatchHandle, name: str, token_budget: int = 8192
) -> dict[int, list[float]]:
    """Return the log-probs of the rows that a teacher scores, by row."""
    own = worker.teacher_rows(batch, name)
    rows, mine = decode_ints(own.rows), select(batch, decode_ints(own.rows))
    prompts, responses = decode_ints(own.prompt_lengths or mine.prompt_lengths), decode_ints(mine.response_lengths)
    numbers = rows // SAMPLES if own.prompts is None else decode_ints(own.prompts)
    plan = plan_forward(prompts, responses, num_ranks=1, token_budget=token_budget, prefixes=(numbers, prompts))
    assert own.shares_prompts
    if len(plan.rank(0)) == 1:  # a prompt is computed once for its samples
        assert plan.rank(0)[0].num_tokens == responses.sum() + sum(dict(zip(numbers, prompts, strict=True)).values())
    if isinstance(worker, PolicyWorker):
        result = worker.score_teacher(mine, plan, name, 0)
    else:
        assert isinstance(worker, TeacherWorker)
        result = worker.score(mine, plan)
    assert result.put is not None
    scored = with_column(mine, result.put.dtypes, [result.put.chunk], rows_by_rank(plan))
    stored = store.read(scored, ["teacher_logprobs"])["teacher_logprobs"].to_pylist()
    store.delete([result.put.chunk])
    return dict(zip(rows.tolist(), stored, strict=True))


def test_each_teacher_scores_the_rows_of_its_data_sources_with_the_prompt_that_it_reads(folder: Path) -> None:
    teachers = {
        "big": {"path": str(folder / "big"), "data_sources": ["sums"]},
        "hinted": {"path": str(folder / "other"), "data_sources": ["games"], "prompt": HINT},
        "own": {"prompt": HINT},
    }
    config, store = config_of(folder, teachers), MemoryStore("run-1", capacity_bytes=2**20)
    run, batch = sampled(config, store)
    names = ("prompt_text", "answer", "info", "prompt_ids", "teacher_prompt_ids", "response_ids")
    columns = store.read(batch, names).to_pydict()
    tokenizer = load_tokenizer(config.model)
    workers: dict[str, ScoringWorker] = {
        "big": TeacherWorker(run, 0, store), "hinted": TeacherWorker(run, 1, store), "own": PolicyWorker(run, 0, store)
    }  # fmt: skip
    models = {"big": "big", "hinted": "other", "own": "model"}
    taught = {"sums": "big", "games": "hinted", "names": "own"}
    found: dict[int, str] = {}
    for name, worker in workers.items():
        worker.start()  # type: ignore[attr-defined]
        model = load_model(config.model.replace(path=str(folder / models[name])))
        scores = scores_of(worker, store, batch, name)
        again = scores_of(worker, store, batch, name, token_budget=80)  # packed otherwise
        for row, logprobs in scores.items():
            info = json.loads(columns["info"][row])
            assert taught[info["data_source"]] == name
            prompt = columns["prompt_ids"][row]
            if name != "big":
                text = HINT.format(prompt=columns["prompt_text"][row], answer=columns["answer"][row], **info)
                prompt = tokenizer(f"<|user|>{text}<|assistant|>", add_special_tokens=False)["input_ids"]
            assert columns["teacher_prompt_ids"][row] == prompt
            expected = plain_logprobs(model, prompt, np.array(columns["response_ids"][row]), 1.0)
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(again[row], logprobs, rtol=0, atol=1e-5)
        found |= dict.fromkeys(scores, name)
    assert sorted(found) == list(range(batch.num_rows))


def test_a_teacher_puts_its_most_likely_tokens_of_those_that_the_policy_has(folder: Path) -> None:
    make_tiny_model(folder / "padded", seed=9, vocab_size=264, initializer_range=0.3)
    config = config_of(folder, {"big": {"path": str(folder / "padded")}}, "js")
    store = MemoryStore("run-1", capacity_bytes=2**20)
    run, batch = sampled(config, store)
    worker = TeacherWorker(run, 0, store)
    worker.start()
    lengths = decode_ints(batch.prompt_lengths), decode_ints(batch.response_lengths)
    plan = plan_forward(*lengths, num_ranks=1, token_budget=80)
    result = worker.score(batch, plan)
    assert result.put is not None
    batch = with_column(batch, result.put.dtypes, [result.put.chunk], rows_by_rank(plan))
    columns = store.read(batch, ("prompt_ids", "response_ids", "teacher_logprobs", *TOP_COLUMNS)).to_pylist()
    model, beyond = load_model(config.model.replace(path=str(folder / "padded"))), 0
    for row in columns:
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        with torch.no_grad():
            every = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
        beyond += int((every.topk(5).indices >= 260).sum())
        top = every[:, :260].topk(5)
        assert row["teacher_top_ids"] == top.indices.tolist()
        np.testing.assert_allclose(row["teacher_top_logprobs"], top.values.numpy(), rtol=0, atol=1e-5)
        chosen = every.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        np.testing.assert_allclose(row["teacher_logprobs"], chosen.numpy(), rtol=0, atol=1e-5)
    assert beyond
    dtypes = column_dtypes(config, 260)
    assert {name: dtypes[name] for name in result.put.dtypes} == result.put.dtypes


def test_ranks_of_teachers_are_workers_and_the_policy_itself_needs_none(folder: Path) -> None:
    teachers = {
        "big": {"path": "big", "num_ranks": 2, "data_sources": ["a"]},
        "own": {"prompt": HINT, "data_sources": ["b"]},
        "other": {"path": "other"},
    }
    config = config_of(folder, teachers, kl={"coef": 0.1})
    assert teacher_workers(config) == {"big": range(2), "other": range(2, 3)}
    assert frozen_groups(config) == [("reference", range(1)), ("teacher", range(2)), ("teacher", range(2, 3))]
    assert frozen_groups(run_config(folder)) == []


def test_feedback_is_cut_to_the_longest_prompt(folder: Path) -> None:
    teacher = {"path": "big", "prompt": "{prompt}{feedback}", "max_prompt_tokens": 20}
    config = config_of(folder, {"big": teacher})
    tokenizer = load_tokenizer(config.model)
    prompts, row = TeacherPrompts(config, tokenizer), load_train_prompts(config.data, tokenizer)[0]
    assert tokenizer.decode(prompts.encode(row, "!")) == "<|user|>0 + 1 =!<|assistant|>"
    assert tokenizer.decode(prompts.encode(row, "?" * 40)) == f"<|user|>0 + 1 ={'?' * 10}<|assistant|>"  # 40, 20, 10


def test_a_teacher_reads_the_tools_that_an_environment_has_added(folder: Path) -> None:
    config = config_of(folder, {"big": {"path": "big", "prompt": HINT}})
    tokenizer = load_tokenizer(config.model)
    row = load_train_prompts(config.data, tokenizer)[0]
    tokenizer.chat_template = CALLING
    prompts, tool = TeacherPrompts(config, tokenizer), {"type": "function", "function": {"name": "add"}}
    without, with_tool = prompts.encode(row), prompts.encode(replace(row, tools=json.dumps([tool])))
    text = "<|user|>0 + 1 = The answer is 1, of row 0.<|assistant|>"
    assert tokenizer.decode(without) == text
    assert tokenizer.decode(with_tool) == json.dumps(tool) + text


def test_the_weights_of_a_teacher_are_checked_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    cut = make_tiny_model(tmp_path / "cut", seed=8)
    config = config_of(folder, {"cut": {"path": str(cut)}})
    check_run(config)
    weights = load_file(cut / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, cut / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"cut.*model\.norm\.weight"):
        check_run(config)


def refusal(folder: Path, teachers: Mapping[str, Any], **fields: Any) -> UserError:
    config = config_of(folder, teachers, **fields)
    tokenizer = load_tokenizer(config.model)
    with pytest.raises(UserError) as caught:
        check_teachers(config, tokenizer, load_train_prompts(config.data, tokenizer))
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_teacher_with_another_tokenizer_is_refused_by_name(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["[new]"])
    make_tiny_model(folder / "larger", tokenizer=tokenizer)
    error = refusal(folder, {"wide": {"path": str(folder / "larger")}})
    assert isinstance(error, ModelError)
    assert str(error).startswith(f"distillation.teachers.wide.path {folder / 'larger'}: its tokenizer is not that")
    assert "261 and 260 tokens, of which 1 differ, such as '[new]'" in str(error)
    assert "distillation.teachers.big.path nowhere" in str(refusal(folder, {"big": {"path": "nowhere"}}))


def test_rows_without_a_teacher_or_a_field_or_too_long_are_refused(folder: Path) -> None:
    big = {"path": str(folder / "big")}
    error = refusal(folder, {"big": {**big, "data_sources": ["sums", "games"]}})
    assert isinstance(error, DataError)
    assert "the data source 'names' has no teacher" in str(error)
    assert "has {solution}, which extra_info" in str(refusal(folder, {"big": {**big, "prompt": "{prompt}{solution}"}}))
    long = refusal(folder, {"big": {**big, "prompt": HINT, "max_prompt_tokens": 20}})
    assert "more than distillation.teachers.big.max_prompt_tokens = 20" in str(long)
    error = refusal(folder, {"big": {**big, "prompt": HINT}}, packing={"token_budget": 40})
    assert isinstance(error, ConfigError)
    assert "more than packing.token_budget, 40" in str(error)
    few = refusal(folder, {"big": big}, divergence="js", top_k=261)
    assert "distillation.top_k is 261, more than the 260 tokens of the policy and distillation.teachers.big" in str(few)


@pytest.mark.parametrize(
    ("distillation", "message"),
    [
        ({"teachers": {"own": {}}}, "from which it would learn nothing"),
        ({"teachers": {"a": {"path": "a"}, "b": {"path": "b"}}}, "a and b name no data_sources"),
        ({"teachers": {"a": {"path": "a", "data_sources": ["x"]}, "b": {"path": "b", "data_sources": ["x"]}}}, "'x'"),
        ({"teachers": {"a": {"path": "a", "prompt": "{answer}"}}}, "without {prompt}"),
        ({"teachers": {"a": {"path": "a", "prompt": "{prompt} {a.b}"}}}, r"{a\.b} is no name"),
        ({"teachers": {}}, "at least 1"),
    ],
)
def test_configs_of_teachers_that_make_no_sense_are_refused(
    folder: Path, distillation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_config(folder, distillation=distillation)


def test_settings_that_contradict_a_teacher_are_refused(folder: Path) -> None:
    teachers = {"big": {"path": "big", "prompt": "{prompt}!"}}
    with pytest.raises(ValueError, match="dynamic_sampling drops groups by their rewards"):
        run_config(folder, distillation={"teachers": teachers}, rollout={"dynamic_sampling": {}})
    with pytest.raises(ValueError, match=r"data\.reuse\.run takes rows of another run"):
        run_config(
            folder,
            distillation={"teachers": teachers},
            data={"reuse": {"num_groups": 1, "run": "x", "steps": [0, 1]}},
            correction={"kind": "truncated"},
        )
