"""Checkpoints exported as Hugging Face folders, and evaluated: the newest, a given or the best one."""

import json
import os
import shutil
from contextlib import closing
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from flows.cli.main import app
from flows.evaluate import evaluate_run
from flows.export import export_run
from flows.preflight import check_checkpoint
from infra.checkpoints import model as exports
from infra.checkpoints.files import best_version
from infra.checkpoints.model import write_model_folder
from infra.checkpoints.shards import file_entry
from infra.checkpoints.state import policy_tensors
from infra.checkpoints.store import CheckpointStore, open_checkpoints
from infra.models.assets import save_assets
from infra.models.load import describe_adapter, load_model
from infra.models.lora import merged_weights
from infra.storage.runs import RunDirectory
from infra.stores.chunk_index import MemoryStore
from infra.workers.policy import PolicyWorker
from infra.workers.reward import open_model_here
from infra.workers.rollout import RolloutWorker
from rl_core.rewards import RewardItem
from schemas.config.data import DataConfig
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.reward import ModelReward, WeightedReward
from schemas.errors import CheckpointError, ConfigError, DataError, ModelError, RunError
from schemas.step import EvalReport, RunHandle, comparable
from tests.support.configs import run_config
from tests.support.policies import load_policy
from tests.support.tiny import make_tiny_data, make_tiny_model, make_tiny_moe, make_tiny_reward_model
from tests.support.two_ranks import peaks_of_exports, save, save_by_ranks, save_whole
from tests.support.weight_tensors import load_state

IDS = torch.arange(40, 60)[None]
LORA = LoraConfig(rank=2, alpha=4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model whose config has the dtype bfloat16."""
    folder = make_tiny_model(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path, ModelConfig(path=str(base)))


def make_run(tmp_path: Path, model: ModelConfig) -> RunDirectory:
    data = make_tiny_data(tmp_path / "rows.jsonl", 4)
    config = run_config(
        tmp_path,
        model=model,
        data={"train_path": str(data), "eval_path": str(data)},
        reward={"kind": "function", "path": "text_reward:score"},
        eval={"num_prompts": 3},
        rollout={"max_response_tokens": 4},
    )
    return RunDirectory.create(config, "run")


def save_version(run: RunDirectory, version: int) -> PreTrainedModel:
    """Train the starting weights a little, differently for each version, and save them as that version."""
    config = run.config()
    model = load_policy(config.model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01 * version)
    for _ in range(2):
        model(IDS).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    open_checkpoints(run, config.checkpoint).save(
        version,
        policy_tensors(model, optimizer),
        num_updates=version,
        report=None,
        adapter=describe_adapter(config.model),
        write_assets=partial(save_assets, config.model),
    ).wait()
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def evaluation(version: int, accuracy: float) -> EvalReport:
    return EvalReport(
        policy_version=version, num_prompts=4, accuracy=accuracy, reward=accuracy, num_failed=0, seconds=1.0
    )


def test_a_checkpoint_of_another_model_is_rejected_before_anything_starts(run: RunDirectory, base: Path) -> None:
    check_checkpoint(run, run.config())  # no checkpoint yet
    save_version(run, 1)
    check_checkpoint(run, run.config())
    shutil.rmtree(base)
    make_tiny_model(base, intermediate_size=48)
    with pytest.raises(
        ModelError, match=r"is not the model that run run trains: .*gate_proj.weight is \[32, 16\].*\[48, 16\]"
    ):
        check_checkpoint(run, run.config())


@pytest.mark.parametrize("damage", ["lost", "cut off", "manifest"])
def test_a_damaged_checkpoint_is_not_taken_for_one_of_another_model(run: RunDirectory, base: Path, damage: str) -> None:
    for version in (1, 2):
        save_version(run, version)
    folder = Path(run.checkpoints, "step-000002")
    file = folder / "manifest.json" if damage == "manifest" else next(folder.glob("rank-*"))
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    check_checkpoint(run, run.config())
    shutil.rmtree(base)
    make_tiny_model(base, intermediate_size=48)
    with pytest.raises(ModelError, match=r"is not the model that run run trains: .*step-000001 doesn't match"):
        check_checkpoint(run, run.config())


def test_the_newest_checkpoint_is_exported_with_config_and_tokenizer(
    run: RunDirectory, base: Path, tmp_path: Path
) -> None:
    save_version(run, 1)
    trained = save_version(run, 2)
    shutil.rmtree(base)  # an export of full weights needs nothing else
    out = tmp_path / "deep" / "out"
    assert export_run(run, out, dtype="float32") == 2
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(exported), logits(trained))
    assert exported.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("größe 4 ≠ 5")["input_ids"]) == "größe 4 ≠ 5"
    assert tokenizer.chat_template
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert exported.generation_config.eos_token_id == trained.generation_config.eos_token_id
    assert {file.suffix for file in out.iterdir()} == {".json", ".safetensors", ".jinja"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_an_export_is_on_disk_before_it_appears(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline takes a folder that exists for a whole model, also after a power failure."""
    save_version(run, 1)
    out, synced = tmp_path / "models" / "new" / "out", dict[str, int]()
    replace, fsync = os.replace, os.fsync

    def noted_fsync(file: int) -> None:
        synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size
        fsync(file)

    def checked_replace(source: Path, target: Path) -> None:
        if Path(target) == out:
            assert all(synced[str(file)] == file.stat().st_size for file in Path(source).rglob("*") if file.is_file())
            assert all(str(path) in synced for path in (source, *Path(source).rglob("*")))
            assert str(out.parent) not in synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", checked_replace)
    export_run(run, out)
    assert {str(out.parent), str(out.parent.parent)} <= synced.keys()


def test_weights_have_the_base_models_dtype_and_names_with_tied_ones_once(
    run: RunDirectory, base: Path, tmp_path: Path
) -> None:
    trained = save_version(run, 1)
    export_run(run, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: p.detach().to(torch.bfloat16) for name, p in trained.named_parameters()}
    assert trained.config.tie_word_embeddings
    assert weights.keys() == expected.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_an_adapter_is_merged_into_its_base(base: Path, tmp_path: Path, gradient_checkpointing: bool) -> None:
    config = ModelConfig(path=str(base), lora=LORA, gradient_checkpointing=gradient_checkpointing)
    run = make_run(tmp_path, config)
    trained = save_version(run, 1)
    export_run(run, tmp_path / "out", dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.state_dict().keys() == load_model(ModelConfig(path=str(base))).state_dict().keys()
    torch.testing.assert_close(logits(exported), logits(trained), rtol=0, atol=1e-4)
    assert (logits(exported) - logits(load_model(ModelConfig(path=str(base))))).abs().max() > 1e-2
    shutil.rmtree(base)
    with pytest.raises(ModelError, match="no such folder"):
        export_run(run, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_adapter_is_merged_into_the_base_that_it_was_trained_on(base: Path, tmp_path: Path) -> None:
    """A link in the model's path may lead to another model before the adapter is saved."""
    link, promoted = tmp_path / "current", make_tiny_model(tmp_path / "promoted", seed=1)
    link.symlink_to(base)
    run = make_run(tmp_path, ModelConfig(path=str(link), lora=LORA))
    handle = RunHandle(run_id="run", identity="run", directory=str(run.path), config=run.config(), store_incarnation="")
    worker = PolicyWorker(handle, store=MemoryStore("run", capacity_bytes=1))
    worker.start()
    link.unlink()
    link.symlink_to(promoted)
    worker.save(0)
    worker.finish_saving()
    export_run(run, tmp_path / "out", dtype="float32")
    expected, other = (logits(load_model(ModelConfig(path=str(path)))) for path in (base, promoted))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(exported), expected)  # a new adapter changes nothing
    shutil.rmtree(base)
    shutil.copytree(promoted, base)
    with pytest.raises(ModelError, match=rf"{base} is not the model that the adapter in .*step-000000 was trained on"):
        export_run(run, tmp_path / "again")
    manifest = run.path / "policy" / "step-000000/manifest.json"
    content = json.loads(manifest.read_text())
    del content["adapter"]["base_digest"]
    manifest.write_text(json.dumps(content))
    export_run(run, tmp_path / "again", dtype="float32")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointStore]:
    """Checkpoints of two ranks: of models with and without tied weights and adapters, and of experts."""
    folder = tmp_path_factory.mktemp("saved")
    bases = {
        "plain": make_tiny_model(folder / "plain"),
        "tied": make_tiny_model(folder / "tied", tie_word_embeddings=True),
        "experts": make_tiny_moe(folder / "experts"),
    }
    places = {}
    for kind, base in bases.items():
        places[kind] = folder / f"{kind}-policy", ModelConfig(path=str(base))
        places[f"{kind}-adapter"] = folder / f"{kind}-adapter-policy", ModelConfig(path=str(base), lora=LORA)
    save_by_ranks(dict(places.values()))
    return {kind: CheckpointStore(str(place)) for kind, (place, _) in places.items()}


@pytest.mark.parametrize("shard_bytes", [exports.SHARD_BYTES, 8_000], ids=["one-file", "files"])
@pytest.mark.parametrize("kind", ["plain", "tied", "experts", "plain-adapter", "tied-adapter", "experts-adapter"])
def test_an_export_has_the_bytes_of_transformers_own_save_of_the_whole_model(
    saved: dict[str, CheckpointStore], kind: str, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved[kind]
    assert len(list(Path(store.path(1)).glob("rank-*.safetensors"))) == 2
    monkeypatch.setattr(exports, "SHARD_BYTES", shard_bytes)
    write_model_folder(store, 1, tmp_path / "out", torch.bfloat16)
    save_whole(store, tmp_path / "expected", torch.bfloat16, shard_bytes)
    files = [{file.name: file.read_bytes() for file in (tmp_path / out).glob("model*")} for out in ("out", "expected")]
    assert (len(files[0]) == 1) == (shard_bytes == 5 * 10**9)
    if "experts" not in kind or len(files[0]) == 1:  # of several files, transformers' have all experts of a layer
        assert files[0] == files[1]
    own, loaded = (load_tensors(tmp_path / out) for out in ("out", "expected"))
    assert own.keys() == loaded.keys()
    assert all(torch.equal(own[name], value) and own[name].dtype == value.dtype for name, value in loaded.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_an_export_takes_memory_for_a_file_of_weights_and_not_for_the_model(tmp_path: Path) -> None:
    shard_bytes, sizes = 4 * 2**20, {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    folders = []
    for layers in (2, 4, 16):  # the first one, which isn't compared, pays for what a process pays for once
        base = make_tiny_model(tmp_path / f"base-{layers}", num_hidden_layers=layers, **sizes)
        for lora in (None, LORA):
            config = ModelConfig(path=str(base), lora=lora)
            model = load_policy(config)
            folders.append(tmp_path / f"policy-{layers}-{lora is not None}")
            save(config, folders[-1], model, torch.optim.AdamW(model.parameters()))
    assert sum(file.stat().st_size for file in base.glob("*.safetensors")) > 12 * shard_bytes  # the model in float32
    peaks = peaks_of_exports(folders, shard_bytes)
    assert max(peaks[4:]) < max(peaks[2:4]) + 2 * shard_bytes
    assert max(peaks[2:]) < 5 * shard_bytes


def test_a_given_step_or_the_best_can_be_exported(run: RunDirectory, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        save_version(run, version)
    for version, accuracy in ((0, 0.9), (1, 0.5), (2, 0.75), (3, 0.25)):
        run.metrics.append_eval(evaluation(version, accuracy))
    assert export_run(run, tmp_path / "best", best=True) == 2
    assert export_run(run, tmp_path / "first", version=1) == 1
    with pytest.raises(RunError, match=r"no checkpoint of step 4 in .*/policy; complete checkpoints: 1, 2, 3"):
        export_run(run, tmp_path / "out", version=4)
    with pytest.raises(ConfigError, match="--best and --step 1"):
        export_run(run, tmp_path / "out", version=1, best=True)
    assert not (tmp_path / "out").exists()


def test_the_best_is_the_newest_of_equals_among_existing_versions() -> None:
    evals = [evaluation(1, 0.5), evaluation(2, 0.5), evaluation(3, 0.75), evaluation(4, 0.25)]
    assert best_version(evals, [1, 2, 3, 4]) == 3
    assert best_version(evals, [1, 2, 4, 5]) == 2
    assert best_version(evals, [5]) is None


def test_a_loss_that_isn_t_a_number_is_never_the_best(run: RunDirectory) -> None:
    for version, loss in enumerate((nan, 2.5, inf, 1.5, nan), start=1):
        run.metrics.append_eval(evaluation(version, 0.9).replace(loss=loss))
    evals = run.metrics.evals()
    assert best_version(evals, [1, 2, 3, 4, 5]) == 4
    assert best_version(evals, [1, 2]) == 2


def test_the_best_is_by_what_the_newest_evaluation_measured() -> None:
    evals = [evaluation(1, 0.8), evaluation(2, 0.9).replace(measured="easy"), evaluation(2, 0.3), evaluation(3, 0.4)]
    hard = [*evals[:2], *(each.replace(measured="hard") for each in evals[2:])]
    assert best_version(hard, [2, 3]) == 3
    assert best_version(hard, [1, 2, 3]) == 1  # of an earlier Sluice, which didn't say what it measured
    assert best_version(hard[:2], [1, 2, 3]) == 2
    assert comparable(hard, "easy") == hard[:2]
    assert comparable([]) == []


def test_what_cannot_be_exported_is_reported(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no complete checkpoint"):
        export_run(run, tmp_path / "out")
    with pytest.raises(RunError, match=r"was evaluated; .*; complete checkpoints: none"):
        export_run(run, tmp_path / "out", best=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(ConfigError, match="is not an empty folder"):
            export_run(run, taken)
    with pytest.raises(ConfigError, match="--dtype int8: expected one of float32, bfloat16, float16"):
        export_run(run, tmp_path / "out", dtype="int8")


def test_a_damaged_checkpoint_is_not_exported(run: RunDirectory, tmp_path: Path) -> None:
    save_version(run, 1)
    (shard,) = (run.path / "policy").glob("step-000001/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        export_run(run, tmp_path / "out", version=1)


def test_weights_that_the_config_does_not_describe_are_rejected(run: RunDirectory, tmp_path: Path) -> None:
    save_version(run, 1)
    store = open_checkpoints(run, run.config().checkpoint)
    config = run.path / "policy" / "step-000001/hf/config.json"
    manifest = run.path / "policy" / "step-000001/manifest.json"
    changed = config.read_bytes().replace(b'"intermediate_size": 32', b'"intermediate_size": 48')
    config.write_bytes(changed)
    content = json.loads(manifest.read_text())
    content["files"]["hf/config.json"] = file_entry(changed).model_dump()
    manifest.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate_proj\.weight is \[32, 16\] torch.float32, expected \[48, 16\]"
    ):
        write_model_folder(store, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(run: RunDirectory, tmp_path: Path) -> None:
    save_version(run, 1)
    (tmp_path / "out").mkdir()
    arguments = ["export", str(run.path), str(tmp_path / "out"), "--step", "1", "--dtype", "float16"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert f"wrote policy version 1 to {tmp_path / 'out'}" in result.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float16


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapter"])
def test_an_evaluation_uses_the_newest_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None
) -> None:
    (tmp_path / "text_reward.py").write_text(
        "def score(prompt, completion, answer, info):\n    return sum(map(ord, completion)) / 1000\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path, ModelConfig(path=str(base), lora=lora))
    with pytest.raises(RunError, match="has no complete checkpoint"):
        evaluate_run(run, None, None)
    trained = save_version(run, 3)
    report = evaluate_run(run, None, 3)
    assert (report.policy_version, report.num_prompts, report.num_failed) == (3, 3, 0)
    handle = RunHandle(run_id="run", identity="run", directory=str(run.path), config=run.config(), store_incarnation="")
    worker = RolloutWorker(handle, store=MemoryStore("run", capacity_bytes=1))
    worker.start()
    rows = range(report.num_prompts)
    assert fmean(worker.evaluate(0, rows).rewards) != report.reward  # of the starting weights
    load_state(worker.engine, merged_weights(trained), 3)
    assert fmean(worker.evaluate(3, rows).rewards) == pytest.approx(report.reward)  # of the published weights


def test_an_evaluation_needs_no_training_prompts(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is gone, or the sources are; what limits a micro-batch of training is no limit of an evaluation."""
    (tmp_path / "text_reward.py").write_text("def score(prompt, completion, answer, info):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path, ModelConfig(path=str(base)))
    save_version(run, 1)
    held_out = shutil.copy(run.config().data.eval_path, tmp_path / "test.jsonl")
    Path(run.config().data.train_path).unlink()
    report = evaluate_run(run, str(held_out), 2, ["packing.token_budget=2"])
    assert (report.num_prompts, report.reward) == (2, 1.0)
    sources = [{"path": "gone.jsonl"}, {"path": "gone-too.jsonl", "weight": 2}]
    of_sources = {"train_path": None, "sources": sources, "curriculum": {"kind": "sources"}}
    run.write_config(run.config().replace(data=DataConfig(**{**run.config().data.model_dump(), **of_sources})))
    assert evaluate_run(run, str(held_out), 2).reward == 1.0
    sources[0]["environment"] = {"kind": "class", "path": "games:Game"}
    run.write_config(run.config().replace(data=run.config().data.replace(sources=DataConfig(sources=sources).sources)))
    with pytest.raises(DataError, match=r"gone.jsonl: no such file; .* it tells which one a row has"):
        evaluate_run(run, str(held_out), 2)


def test_an_evaluation_scores_by_a_reward_model_without_ray(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, line = tmp_path / "seen.jsonl", "json.dumps([prompt, [completion], answer, info])"
    (tmp_path / "text_reward.py").write_text(
        "import json\n\ndef score(prompt, completion, answer, info):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n        print({line}, file=file)\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path, ModelConfig(path=str(base)))
    save_version(run, 1)
    evaluate_run(run, None, None)
    model = ModelReward(path=str(make_tiny_reward_model(tmp_path / "liked")), max_tokens=200)
    items = [RewardItem(*json.loads(each)) for each in seen.read_text().splitlines()]
    with closing(open_model_here(model)) as scorer:
        expected = [outcome.group[0].reward for outcome in scorer.score(items)]
    for reward in (model, WeightedReward.model_validate({"parts": {"liked": {"reward": model}}})):
        run.write_config(run.config().replace(reward=reward))
        report = evaluate_run(run, None, None)
        assert (report.num_prompts, report.num_failed) == (3, 0)
        assert report.reward == pytest.approx(fmean(expected))
