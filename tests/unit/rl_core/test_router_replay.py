"""The experts of a forward are recorded, and replayed by another, of every family that routes by `torch.topk`."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.scoring import (
    PackedRow,
    RouterReplay,
    pack_row,
    packed_scores,
    padded_scores,
    use_packed_attention,
    use_padded_attention,
)
from rl_core.training import ScoringModule
from schemas.config.optim import PackingConfig
from schemas.errors import ModelError, ScoringError
from tests.support.packed import SIZES, random_batch
from tests.unit.rl_core.gradients import gradients, relative_error
from tests.unit.rl_core.test_model_families import EXPERTS, LATENT, NO_TOKENS, make_family

GROUPED = {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}
OTHERS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**GROUPED, "first_k_dense_replace": 1}),
    "deepseek_v2": ("DeepseekV2", {**GROUPED, "first_k_dense_replace": 0, "topk_method": "group_limited_greedy"}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
REPLAYED = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "mixtral", "granitemoe", "deepseek_v3")
PROMPTS, RESPONSES = [3, 1, 5], [4, 7, 2]
PACKING = PackingConfig(logits_chunk_tokens=4)


def make_moe(name: str) -> PreTrainedModel:
    if name not in OTHERS:
        return make_family(name)
    prefix, options = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **NO_TOKENS, **options})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def perturb(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)


def score(model: PreTrainedModel, row: PackedRow) -> Tensor:
    return packed_scores(model, row, temperature=1.0, chunk_tokens=4).logprobs


@pytest.mark.parametrize("name", REPLAYED)
def test_recorded_experts_are_replayed_under_other_weights(name: str) -> None:
    model, row = make_moe(name), random_batch(PROMPTS, RESPONSES).row
    use_packed_attention(model)
    replay = RouterReplay(model)
    with replay.recording() as chosen, torch.no_grad():
        free = score(model, row)
    [experts] = chosen
    assert experts.shape == (len(row.input_ids), replay.width)
    replayed = replace(row, experts=experts.to(torch.uint8))
    torch.testing.assert_close(score(model, replayed), free, rtol=0, atol=1e-6)
    perturb(model)
    with replay.recording() as own:
        ours = score(model, row)
    with replay.recording() as used:
        theirs = score(model, replayed)
    assert not torch.equal(own[0], experts)
    assert torch.equal(used[0], experts)
    assert not torch.equal(ours, theirs)
    use_padded_attention(model)
    padded = padded_scores(model, replayed, temperature=1.0, chunk_tokens=4).logprobs
    torch.testing.assert_close(padded, theirs, rtol=0, atol=1e-5)


def test_gradients_reach_the_router_and_are_the_same_for_every_packing() -> None:
    model, batch = make_moe("qwen3_moe"), random_batch(PROMPTS, RESPONSES)
    use_packed_attention(model)
    replay, generator = RouterReplay(model), torch.Generator().manual_seed(0)
    experts = torch.rand(len(batch.row.input_ids), replay.num_layers, 4, generator=generator).topk(2).indices
    row = replace(batch.row, experts=experts.flatten(1))
    whole = gradients(model, score(model, row).square().sum())
    assert all(layer.mlp.gate.weight.grad.any() for layer in model.get_decoder().layers)
    starts = row.cu_seqlens[:-1].tolist()
    own = [sequence_of(row, *at) for at in zip(starts, PROMPTS, RESPONSES, strict=True)]
    alone = sum((score(model, each).square().sum() for each in own), start=torch.zeros(()))
    assert relative_error(gradients(model, alone), whole) < 1e-6
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    other = replace(row, experts=row.experts.flip(0))
    loss = score(model, row).square().sum()
    score(model, other)  # before the backward computes the layers again
    assert relative_error(gradients(model, loss), whole) < 1e-6


def sequence_of(row: PackedRow, start: int, prompt: int, response: int) -> PackedRow:
    """Return one sequence of a row as a row of its own."""
    ids, experts = (part[start : start + prompt + response] for part in (row.input_ids, row.experts))
    parts = experts[:prompt], experts[prompt:]
    return pack_row(ids[:prompt], torch.tensor([prompt]), ids[prompt:], torch.tensor([response]), parts)


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_start_up_checks_what_routers_do_with_experts(kind: str) -> None:
    packing = PACKING.replace(kind=kind)
    ScoringModule(make_moe("deepseek_v3"), packing, 1.0, router_replay=True).probe()
    module = ScoringModule(make_moe("deepseek_v2"), packing, 1.0, router_replay=True)
    with pytest.raises(ScoringError, match="deepseek_v2 gives no weight to experts of groups that it doesn't prefer"):
        module.probe()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phimoe", r"has routers that can't be given experts \(a router of phimoe chose experts by 0 calls"),
        ("qwen2", "has no experts in the layers of its decoder"),
    ],
)
def test_other_families_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=rf"a model of the family {name} {reason}.*; set it to false"):
        RouterReplay(make_moe(name))


def test_a_router_of_an_unknown_name_is_refused() -> None:
    model = make_moe("qwen3_moe")
    block = model.get_decoder().layers[0].mlp
    block.chooser = block.gate
    del block.gate
    with pytest.raises(ModelError, match="has no router next to the experts of its Qwen3MoeSparseMoeBlock"):
        RouterReplay(model)
