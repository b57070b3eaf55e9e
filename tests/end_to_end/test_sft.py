"""Whole runs of supervised fine-tuning through the command.

An undisturbed run; one that is killed; and one with two ranks, which packs other micro-batches.
"""

import json
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.datasets.sft import load_rows, load_train_rows
from infra.models.load import load_tokenizer
from infra.monitors.rows import recorded_rows
from tests.support.commands import sluice_in_turn
from tests.support.progress import wait_until
from tests.support.run_results import Run
from tests.support.sft import MARKED, sft_config, sft_toml, write_sums
from tests.support.tracker_files import jsonl_history
from tests.support.workplace import Workplace

STEPS, WHOLE = 6, "sft-whole"
MUON = ("steps=5", "optim.kind=muon", "optim.lr=2e-2", "eval.every_steps=0")
KEPT = ("store.keep_steps=all", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
# Of the undisturbed run, which they leave as it is.
COMMANDS = {
    "replay": ("replay", WHOLE, "--steps", "2"),
    "inspect": ("inspect", WHOLE, "2", "--rows", "8"),
    "export": ("export", WHOLE, "exported", "--best"),
    "report": ("report", WHOLE),
    "times": (
        "sql",
        WHOLE,
        "select min(n), max(n), count(*) from (select count(*) as n from rows group by prompt_text)",
    ),
    "kept": (
        *("sql", WHOLE, "select prompt_ids, response_ids, loss_mask from rows where step = 1"),
        *("--out", "kept.parquet"),
    ),
    "eval": ("eval", WHOLE),
    "eval of two": ("eval", WHOLE, "--num-prompts", "2"),
    "plan": ("plan", "sft.toml"),
}
# TRL's trainer, whose steps take the same rows: those of the file, in its order.
PEER = """
import json, sys
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

def train(loss_on):
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = sys.argv[1]
    options = SFTConfig(
        output_dir="trl", per_device_train_batch_size=8, max_steps=6, learning_rate=1e-2, lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        assistant_only_loss=loss_on == "assistant", train_sampling_strategy="sequential", max_length=None,
        model_init_kwargs={"dtype": "float32"}, disable_tqdm=True,
    )
    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    trainer = SFTTrainer(model="model", args=options, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    steps = [step for step in trainer.state.log_history if "loss" in step]
    return {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}

print(json.dumps({loss_on: train(loss_on) for loss_on in ("assistant", "all")}))
"""


@pytest.fixture(scope="module")
def place(workplace: Workplace) -> Workplace:
    write_sums(workplace.folder)
    (workplace.folder / "sft.toml").write_text(sft_toml())
    return workplace


@pytest.fixture(scope="module")
def printed(place: Workplace) -> str:
    monitor = 'monitors=[{kind="jsonl", folder="lines"}]'
    return place.sluice("train", "sft.toml", "--run-id", WHOLE, "store.keep_steps=all", monitor)


@pytest.fixture(scope="module")
def whole(place: Workplace, printed: str) -> Run:
    return place.run(WHOLE)


@pytest.fixture(scope="module")
def shown(place: Workplace, whole: Run) -> dict[str, str]:
    """What the commands print, all in one process."""
    found = dict(zip(COMMANDS, sluice_in_turn(place, *COMMANDS.values()), strict=True))
    assert {name: code for name, (code, _) in found.items()} == dict.fromkeys(COMMANDS, 0), found
    return {name: text for name, (_, text) in found.items()}


@pytest.mark.command("train")
def test_the_loss_falls(whole: Run, printed: str) -> None:
    losses = [metrics["cross_entropy"] for metrics in whole.step_metrics()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1
    assert "reward" not in whole.step_metrics()[0]
    evaluations = whole.evaluations()
    assert [report.policy_version for report in evaluations] == [0, 2, 4, 6]
    held_out = [report.loss for report in evaluations]
    assert held_out == sorted(held_out, reverse=True)  # type: ignore[type-var]
    assert [report.num_prompts for report in evaluations] == [5] * 4
    summary = whole.summary()
    assert summary is not None
    assert (summary.held_out_loss_before, summary.held_out_loss_after) == (held_out[0], held_out[-1])
    assert summary.reward_last is None
    for line in ("held-out loss, before → after", "cross-entropy, mean of first 3 → last 3 steps", "epoch 2.00"):
        assert line in " ".join(printed.replace("│", " ").split()), line


def test_a_monitor_has_each_value_of_its_steps_and_evaluations(place: Workplace, whole: Run) -> None:
    expected = defaultdict(list)
    for row in recorded_rows(whole.metrics):
        for name, value in row.values.items():
            expected[name].append((row.step, value))
    assert [step for step, _ in expected["cross_entropy"]] == list(range(STEPS))
    assert [step for step, _ in expected["eval/loss"]] == [0, 2, 4, 6]
    found = jsonl_history(place.folder / "lines" / f"{whole.run_id}.jsonl")
    del found["step"]  # of both kinds of rows
    assert found == {name: values for name, values in expected.items() if name != "step"}


@pytest.mark.command("sql")
def test_each_epoch_takes_every_row_once(shown: dict[str, str]) -> None:
    assert shown["times"].split()[-3:] == ["2", "2", "24"]


def test_a_killed_run_ends_in_the_same_weights(place: Workplace, whole: Run) -> None:
    driver = place.start("train", "sft.toml", "--run-id", "sft-killed", "runtime.max_restarts=9")
    killed = place.run("sft-killed")
    driver.wait_standing(lambda: killed.passed(1, "put"))
    wait_until((killed.path / "policy/step-000001/manifest.json").exists)
    assert place.kill_worker("SftWorker") == 1
    driver.resume()
    driver.wait_standing(lambda: killed.passed(3, "update"))
    driver.kill()
    place.sluice("resume", "sft-killed")
    assert killed.weights(STEPS) == whole.weights(STEPS)
    assert killed.step_metrics() == whole.step_metrics()
    assert killed.evaluations() == whole.evaluations()
    for run in (whole, killed):  # after the check before the start, no driver and no worker encodes rows
        assert "policy-0: computing on the CPU" in (log := (run.path / "driver.log").read_text())
        assert "encoded" not in log


def test_ranks_and_packing_change_nothing_but_rounding(place: Workplace, whole: Run) -> None:
    place.sluice(
        *("train", "sft.toml", "--run-id", "sft-ranks", "runtime.num_policy_ranks=2", "packing.token_budget=64"),
    )
    for one, two in zip(whole.step_metrics(), place.run("sft-ranks").step_metrics(), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    held_out = [[report.loss for report in run.evaluations()] for run in (whole, place.run("sft-ranks"))]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


@pytest.fixture(scope="module")
def muon(place: Workplace) -> Run:
    place.sluice("train", "sft.toml", "--run-id", "muon", *MUON, *KEPT)
    return place.run("muon")


def test_muon_is_resumed_with_another_number_of_ranks(place: Workplace, muon: Run) -> None:
    driver = place.start("train", "sft.toml", "--run-id", "muon-killed", *MUON, "runtime.num_policy_ranks=2")
    killed = place.run("muon-killed")
    driver.wait_standing(lambda: killed.passed(2, "put"))
    driver.kill()
    place.sluice("resume", "muon-killed", "runtime.num_policy_ranks=1")
    expected = muon.step_metrics()
    assert expected[-1]["cross_entropy"] < expected[0]["cross_entropy"] - 0.5
    for resumed, one in zip(killed.step_metrics(), expected, strict=True):
        assert resumed == pytest.approx(one, rel=1e-5)


@pytest.mark.extended
def test_a_fork_of_a_muon_run_ends_in_its_weights(place: Workplace, muon: Run) -> None:
    printed = place.sluice("fork", "muon", "--at", "3", "--run-id", "muon-fork", "--start")
    assert "made run muon-fork from muon@3: 1 updates repeated" in printed
    fork = place.run("muon-fork")
    assert fork.step_metrics() == muon.step_metrics()
    assert fork.weights(5) == muon.weights(5)


def test_adapters_are_resumed_and_exported_merged(place: Workplace) -> None:
    settings = ("steps=4", "model.lora.rank=4", "optim.lr=0.2", "eval.every_steps=4")
    place.sluice("train", "sft.toml", "--run-id", "lora", *settings)
    driver = place.start("train", "sft.toml", "--run-id", "lora-killed", *settings)
    whole, killed = place.run("lora"), place.run("lora-killed")
    driver.wait_standing(lambda: killed.passed(2, "put"))
    driver.kill()
    place.sluice("resume", "lora-killed")
    assert killed.weights(4) == whole.weights(4)
    assert killed.step_metrics() == whole.step_metrics()
    before, after = (report.loss for report in whole.evaluations())
    assert before is not None
    assert after is not None
    assert after < before - 0.05
    place.sluice("export", "lora-killed", "merged")
    exported = AutoModelForCausalLM.from_pretrained(place.folder / "merged").eval()
    config = sft_config(place.folder)
    rows = load_rows(str(place.folder / "heldout.jsonl"), config, load_tokenizer(config.model))
    losses = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            logprobs = exported(ids).logits.log_softmax(-1)[0, -len(row.response_ids) - 1 : -1]
        taken = logprobs.gather(1, ids[0, -len(row.response_ids) :, None])[:, 0]
        losses += (-taken[torch.from_numpy(row.loss_mask)]).tolist()
    assert sum(losses) / len(losses) == pytest.approx(after, rel=1e-5)


@pytest.mark.command("replay", "inspect", "export", "report")
def test_history_and_export(place: Workplace, shown: dict[str, str]) -> None:
    assert "same bits" in shown["replay"]
    assert "and 2 =" in shown["inspect"]
    model = AutoModelForCausalLM.from_pretrained(place.folder / "exported")
    base = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    weights, before = model.get_input_embeddings().weight, base.get_input_embeddings().weight
    assert not torch.equal(weights, before)


def test_rows_of_kept_steps_are_rows_to_train_on(place: Workplace, shown: dict[str, str]) -> None:
    config, kept = sft_config(place.folder), str(place.folder / "kept.parquet")
    tokenizer = load_tokenizer(config.model)
    again = {(*row.prompt_ids, *row.response_ids[row.loss_mask]) for row in load_rows(kept, config, tokenizer)}
    rows = load_train_rows(config, tokenizer)
    first = {(*row.prompt_ids, *row.response_ids[row.loss_mask]) for row in rows}
    assert len(again) == 8
    assert again < first


@pytest.mark.command("eval")
def test_eval_repeats_the_last_evaluation(whole: Run, shown: dict[str, str]) -> None:
    last = whole.evaluations()[-1]
    assert f"policy version 6: {last}, 5 rows" in shown["eval"]
    assert ", 2 rows" in shown["eval of two"]


@pytest.mark.command("plan")
def test_the_plan_says_what_runs(shown: dict[str, str]) -> None:
    for line in (
        "run sft: 6 steps; SFT, loss cross_entropy on assistant tokens",
        "data: 24 training rows, ",
        "an epoch is 3 steps",
        "<|user|>0 + 1 =<|assistant|>⟦1<|end|>⟧<|user|>and 2 =<|assistant|>⟦3<|end|>⟧",
        "one step: 8 rows",
    ):
        assert line in shown["plan"]


@pytest.fixture(scope="module")
def peer(place: Workplace) -> dict[str, dict[str, list[float]]]:
    """The losses and gradient norms of TRL's steps, by what the loss is on."""
    pytest.importorskip("trl")
    printed = place.python("-P", "-c", PEER, MARKED)
    found: dict[str, dict[str, list[float]]] = json.loads(
        next(line for line in printed.splitlines() if line.startswith('{"assistant"'))
    )
    return found


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_losses_and_gradients_are_those_of_trl(
    place: Workplace, peer: dict[str, dict[str, list[float]]], loss_on: str
) -> None:
    run_id = f"sft-{loss_on}"
    place.sluice("train", "sft.toml", "--run-id", run_id, f"sft.loss_on={loss_on}", "data.shuffle=false")
    expected = peer[loss_on]
    found = {name: [metrics[name] for metrics in place.run(run_id).step_metrics()] for name in expected}
    assert len(expected["loss"]) == STEPS
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
