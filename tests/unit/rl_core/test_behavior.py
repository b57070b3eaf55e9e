"""Behavior log-probs that the update takes from its own forward, and those of a pass before it."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_core.columns.jagged import TURN_COLUMNS, as_tensor, jagged, row_lengths
from rl_core.losses import LossInputs
from rl_core.planning import plan_forward, plan_step
from rl_core.training import RankRows, ScoringModule, Trainer, score_rows, training_columns
from rl_core.training.rows import packed_row, token_advantages
from schemas.config.loss import LossConfig, TruncatedCorrection
from schemas.config.optim import OptimConfig
from schemas.config.run import RunConfig
from schemas.metrics import values
from tests.support.configs import run_config
from tests.support.measured_memory import packed_rows
from tests.support.packed import tiny_qwen3
from tests.unit.rl_core.loss_inputs import every_loss_of_samples

PROMPTS, RESPONSES = [3, 5, 2, 4], [6, 1, 7, 4]
_OF_TURNS = {
    "advantage": {"kind": "turn_level"},
    "environment": {"kind": "class", "path": "game:Game"},
    "reward": {"kind": "environment"},
}


@every_loss_of_samples
def test_the_update_is_the_same_without_a_pass_before_it(loss: LossConfig) -> None:
    own, own_metrics = _gradient(loss, token_budget=64)
    before = loss if loss.kind == "kl_cov" else loss.replace(behavior="recompute")  # it always takes its own
    again, metrics = _gradient(before, token_budget=64)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, again[name], rtol=1e-5, atol=1e-7)
    assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert own_metrics["ratio"] == own_metrics["ratio_max"] == 1
    packed, _ = _gradient(loss, token_budget=12)  # a row of each micro-batch, or two
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, packed[name], rtol=1e-5, atol=1e-6)


def test_which_runs_need_a_pass() -> None:
    assert not run_config().scores_behavior
    assert "behavior_logprobs" not in training_columns(run_config())
    asked, selects = {"loss": {"behavior": "recompute"}}, {"loss": {"kind": "clip_cov"}}
    for sections in (asked, selects, {"optim": {"updates_per_step": 2}}, _KL_IN_REWARD):
        assert run_config(**sections).scores_behavior
        assert "behavior_logprobs" in training_columns(run_config(**sections))


_KL_IN_REWARD = {"kl": {"coef": 0.1, "in_reward": True}}


def _gradient(loss: LossConfig, token_budget: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradient of an update and its metrics."""
    optim = OptimConfig(max_grad_norm=1e9, updates_per_step=2 if loss.kind == "kl_cov" else 1)
    config: RunConfig = run_config(loss=loss, correction=TruncatedCorrection(), optim=optim, model={"path": "unused"})
    module = _module(config)
    rows = packed_rows(PROMPTS, RESPONSES)
    sizes = {"num_ranks": 1, "token_budget": token_budget}
    scores = score_rows(module, rows, plan_forward(PROMPTS, RESPONSES, **sizes).ranks[0])
    columns = {name: rows.columns[name] for name in rows.columns.schema.names}
    lengths = row_lengths(columns["response_ids"])
    columns["behavior_logprobs"] = jagged(scores, lengths)
    columns["sampler_logprobs"] = jagged(scores + 0.1, lengths)
    trainer, found = Trainer(module, config), dict[str, torch.Tensor]()

    def keep(*_: object) -> None:
        found.update({name: weight.grad.clone() for name, weight in trainer.named_parameters().items()})

    trainer.optimizer.register_step_pre_hook(keep)
    update = plan_step(PROMPTS, RESPONSES, RESPONSES, num_updates=1, seed=0, **sizes).updates[0]
    return found, values(trainer.update(RankRows(rows.rows, pa.record_batch(columns)), update))


@pytest.mark.parametrize("sections", [{}, _OF_TURNS], ids=["of rows", "of turns"])
@pytest.mark.parametrize("token_budget", [64, 12])
def test_only_tokens_with_a_loss_pass_through_the_head(token_budget: int, sections: dict[str, Any]) -> None:
    """Which changes nothing; the reference computes all, and selects those with a loss."""
    config = run_config(
        loss={"entropy_coef": 0.01}, optim=OptimConfig(max_grad_norm=1e9), model={"path": "unused"}, **sections
    )
    rows = packed_rows(PROMPTS, RESPONSES)
    mask = np.random.default_rng(1).random(sum(RESPONSES)) < 0.4
    mask[6:7] = False  # a row without a loss
    lengths = row_lengths(rows.columns["response_ids"])
    columns = {name: rows.columns[name] for name in rows.columns.schema.names} | {"loss_mask": jagged(mask, lengths)}
    if sections:  # two turns of each row, with nothing between them, and the first of one token
        ends, two = np.zeros(8, np.int32), np.full(4, 2)
        of_turns = np.column_stack([np.ones(4), np.array(RESPONSES) - 1]).astype(np.int32).ravel()
        advantages = np.arange(8, dtype=np.float32)
        columns |= zip(TURN_COLUMNS, (jagged(each, two) for each in (advantages, of_turns, ends)), strict=True)
    rows = RankRows(rows.rows, pa.record_batch(columns))
    update = plan_step(
        *(PROMPTS, RESPONSES, [int(part.sum()) for part in np.split(mask, np.cumsum(RESPONSES)[:-1])]),
        num_updates=1,
        seed=0,
        num_ranks=1,
        token_budget=token_budget,
    ).updates[0]
    trainer, reference = (Trainer(_module(config), config) for _ in range(2))
    found, num_others = dict[str, torch.Tensor](), 0

    def keep(*_: object) -> None:
        found.update({name: weight.grad.clone() for name, weight in trainer.named_parameters().items()})

    trainer.optimizer.register_step_pre_hook(keep)
    with FlopCounterMode(display=False) as own:
        trainer.update(rows, update)
    with FlopCounterMode(display=False) as every:
        for micro in update.ranks[0]:
            taken = rows.take(micro.rows)
            num_others += int((~as_tensor(taken["loss_mask"])).sum())
            row = packed_row(taken, micro.num_tokens)
            scores = reference.module(row, entropy="grad")
            inputs = LossInputs.from_rows(
                policy_logprobs=scores.logprobs,
                behavior_logprobs=scores.logprobs.detach(),
                sampler_logprobs=as_tensor(taken["sampler_logprobs"]),
                advantages=token_advantages(taken),
                loss_mask=as_tensor(taken["loss_mask"]),
                response_lengths=row.response_lengths,
                entropy=scores.entropy,
            )
            reference._loss(inputs, update)[0].backward()
    for name, weight in reference.named_parameters().items():
        assert (found[name] - weight.grad).norm() < 2e-6 * weight.grad.norm()
    # Their logits, and the gradients of their states; those of the weight are added in place, which isn't counted.
    counts = [counter.get_flop_counts()["Global"][torch.ops.aten.mm] for counter in (own, every)]
    assert counts[1] - counts[0] == 2 * 2 * 256 * 32 * num_others


def _module(config: RunConfig) -> ScoringModule:
    return ScoringModule(tiny_qwen3(num_hidden_layers=2, vocab_size=256), config.packing, 1.0)
