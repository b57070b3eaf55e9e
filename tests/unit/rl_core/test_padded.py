"""Padded batches of verl and TRL as columns and back."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensordict import TensorDict

from rl_core.columns.codec import decode, encode, validate, value_dtypes
from rl_core.columns.jagged import jagged
from rl_core.padded import nest, unnest
from rl_core.padded.layouts import TRL, VERL, PaddedLayout
from tests.unit.rl_core.padded_batches import (
    ADVANTAGES,
    LAYOUTS,
    PAD,
    PROMPT_MASK,
    RESPONSE_EXISTS,
    RESPONSE_TRAINED,
    VOCAB,
    Batch,
    as_dict,
    as_numpy,
    as_tensordict,
    assert_same,
    never_padded,
    trl_batch,
    verl_batch,
)


@LAYOUTS
@pytest.mark.parametrize("form", [as_dict, as_tensordict, as_numpy])
def test_a_batch_survives_a_round_trip(
    make: Callable[[], Batch], layout: PaddedLayout, form: Callable[[Batch], Mapping[str, Any]]
) -> None:
    batch = form(make())
    nested = nest(batch, layout, vocab_size=VOCAB)
    stored = decode(encode(nested.columns))
    assert_same(unnest(stored, layout, nested.geometry, PAD), batch)


@LAYOUTS
def test_both_layouts_give_the_same_columns(make: Callable[[], Batch], layout: PaddedLayout) -> None:
    columns = nest(make(), layout, vocab_size=VOCAB).columns
    validate(columns)
    only_verl = ("token_scores", "token_rewards", "returns", "values", "entropies") if layout is VERL else ()
    assert value_dtypes(columns) == {
        "prompt_ids": "uint16",
        "response_ids": "uint16",
        "loss_mask": "bool",
        "sampler_logprobs": "float",
        "behavior_logprobs": "float",
        "reference_logprobs": "float",
        "advantages": "float",
        **dict.fromkeys(only_verl, "float"),
    }
    assert columns.column("prompt_ids").to_pylist() == [[1, 2], [3], [], [4, 5, 6]]
    assert columns.column("advantages").to_pylist() == ADVANTAGES.tolist()


@LAYOUTS
def test_tool_tokens_exist_and_are_not_trained(make: Callable[[], Batch], layout: PaddedLayout) -> None:
    columns = nest(make(), layout, vocab_size=VOCAB).columns
    assert columns.column("response_ids")[0].as_py() == [10, 11, 12, 13, 14]
    assert columns.column("loss_mask")[0].as_py() == [True, True, False, False, True]
    for name, base in (("sampler_logprobs", -1), ("behavior_logprobs", -2), ("reference_logprobs", -3)):
        paired = zip(columns.column("response_ids").to_pylist(), columns.column(name).to_pylist(), strict=True)
        for ids, values in paired:
            assert values == pytest.approx([base - token / 100 for token in ids])


@LAYOUTS
def test_padding_is_not_stored_and_is_restored_as_the_pad(make: Callable[[], Batch], layout: PaddedLayout) -> None:
    batch, noisy = make(), make()
    absent = RESPONSE_EXISTS == 0
    for name, entry in layout.fields.items():
        if entry.axis == "response" and entry.column not in ("loss_mask", "advantages"):
            noisy[name][absent] = -100
    noisy[layout.ids["prompt"]][PROMPT_MASK == 0] = 10**9
    if "input_ids" in noisy:
        noisy["input_ids"][noisy["attention_mask"] == 0] = -7
        noisy["position_ids"][noisy["attention_mask"] == 0] = -7
        noisy["advantages"][RESPONSE_TRAINED == 0] = 123.0
    nested = nest(noisy, layout, vocab_size=VOCAB)
    assert nested.columns.equals(nest(batch, layout, vocab_size=VOCAB).columns)
    assert_same(unnest(nested.columns, layout, nested.geometry, PAD), batch)
    back = unnest(nested.columns, layout, nested.geometry, pad_token_id=49999)
    assert back[layout.ids["response"]][2].tolist() == [49999] * 5
    assert back[layout.ids["prompt"]][0].tolist() == [49999, 1, 2]


def test_dtypes_survive_a_round_trip() -> None:
    batch = verl_batch()
    batch["old_log_probs"] = batch["old_log_probs"].bfloat16()
    batch["ref_log_prob"] = batch["ref_log_prob"].half()
    batch["attention_mask"] = batch["attention_mask"].bool()
    batch["response_mask"] = batch["response_mask"].to(torch.int32)
    batch["responses"] = batch["responses"].to(torch.int32)
    nested = nest(batch, VERL, vocab_size=VOCAB)
    assert_same(unnest(nested.columns, VERL, nested.geometry, PAD), batch)


def test_without_a_loss_mask_all_existing_tokens_are_trained() -> None:
    for make, layout in ((verl_batch, VERL), (trl_batch, TRL)):
        batch = make()
        del batch[layout.loss_mask]
        if layout is VERL:
            batch["advantages"] = ADVANTAGES[:, None] * RESPONSE_EXISTS
        nested = nest(batch, layout, vocab_size=VOCAB)
        assert nested.columns.column("loss_mask").to_pylist() == [[True] * n for n in (5, 2, 0, 5)]
        assert [entry.name for entry in nested.coverage.fields if entry.disposition == "assumed"] == [layout.loss_mask]
        assert_same(unnest(nested.columns, layout, nested.geometry, PAD), batch)


def test_truncated_completions_masked_by_trl_have_no_tokens() -> None:
    batch = trl_batch()
    for name in ("completion_mask", "tool_mask"):
        batch[name][3] = 0
    nested = nest(batch, TRL, vocab_size=VOCAB)
    assert nested.columns.column("response_ids")[3].as_py() == []
    back = unnest(nested.columns, TRL, nested.geometry, PAD)
    assert back["completion_ids"][3].tolist() == [PAD] * 5
    assert back["tool_mask"][3].tolist() == [1] * 5


def test_a_row_without_trained_tokens_has_advantage_zero() -> None:
    batch = verl_batch()
    batch["response_mask"][1] = 0
    batch["advantages"][1] = 7.0
    assert nest(batch, VERL, vocab_size=VOCAB).columns.column("advantages").to_pylist() == [0.5, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("form", [as_dict, lambda batch: TensorDict(batch, batch_size=[4])])
def test_declared_row_scalars_and_strings_become_columns(form: Callable[[Batch], Mapping[str, Any]]) -> None:
    batch = verl_batch()
    batch["score"] = torch.tensor([1.0, float("nan"), 0.0, 0.5])
    batch["acc"] = torch.tensor([True, False, True, False])
    batch["group"] = torch.tensor([0, 0, 1, 1])
    batch["uid"] = ["a", "é", "", "d"]
    scalars = {"score": "reward", "acc": "reward_acc", "group": "group_id", "uid": "sample_id"}
    nested = nest(form(batch), VERL, vocab_size=VOCAB, row_scalars=scalars)
    columns = nested.columns
    assert columns.column("reward").to_pylist() == [1.0, None, 0.0, 0.5]
    assert columns.column("reward_acc").to_pylist() == [1.0, 0.0, 1.0, 0.0]
    assert columns.column("group_id").to_pylist() == [0, 0, 1, 1]
    assert columns.column("sample_id").to_pylist() == ["a", "é", "", "d"]
    back = unnest(columns, VERL, nested.geometry, PAD)
    assert back.pop("uid") == batch.pop("uid")
    assert_same(back, batch)


def test_numpy_objects_are_strings_and_a_row_scalar_replaces_the_layouts_field() -> None:
    batch = verl_batch() | {"advantages": ADVANTAGES, "answers": np.array(list("wxyz"), dtype=object)}
    declared = {"advantages": "advantages", "answers": "answer"}
    nested = nest(batch, VERL, vocab_size=VOCAB, row_scalars=declared)
    back = unnest(nested.columns, VERL, nested.geometry, PAD)
    assert back["advantages"].tolist() == ADVANTAGES.tolist()
    assert back["answers"] == list("wxyz")


def test_a_column_added_later_becomes_its_field() -> None:
    batch = verl_batch()
    behavior = batch.pop("old_log_probs")
    nested = nest(batch, VERL, vocab_size=VOCAB)
    lengths = np.array([5, 2, 0, 5])
    added = nested.columns.append_column(
        "behavior_logprobs", jagged(behavior.numpy()[RESPONSE_EXISTS.numpy() == 1], lengths)
    )
    assert_same(unnest(added, VERL, nested.geometry, PAD), batch | {"old_log_probs": behavior})


def test_columns_that_were_never_padded_get_the_given_widths() -> None:
    lengths = np.array([2, 1])
    columns = pa.record_batch(
        {
            "prompt_ids": jagged(np.array([1, 2, 3], np.uint16), lengths),
            "response_ids": jagged(np.array([4, 5, 6], np.uint16), lengths),
            "loss_mask": jagged(np.array([True, False, True]), lengths),
            "advantages": pa.array([0.5, -0.5], pa.float32()),
        }
    )
    geometry = never_padded(columns, {"prompt": 3, "response": 4})
    batch = unnest(columns, VERL, geometry, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[9, 1, 2, 4, 5, 9, 9], [9, 9, 3, 6, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 3, 3], [0, 0, 0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[0.5, 0, 0, 0], [-0.5, 0, 0, 0]]
    nested = nest(batch, VERL, vocab_size=VOCAB)
    assert nested.columns.select(columns.schema.names).equals(columns)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, PaddedLayout]:
    """Draw a batch with any masks and with canonical padding, all of which must survive a round trip."""
    num_rows, prompt, response = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 6))
    axes = {"prompt": (num_rows, prompt), "response": (num_rows, response)}
    exists = {axis: draw(hnp.arrays(np.bool_, shape)) for axis, shape in axes.items()}
    trained = draw(hnp.arrays(np.bool_, axes["response"])) & exists["response"]
    ids = {axis: draw(hnp.arrays(np.int64, axes[axis], elements=st.integers(0, 70000))) * exists[axis] for axis in axes}
    values = draw(hnp.arrays(np.float32, axes["response"])) * 1
    values[~exists["response"]] = 0
    rows = draw(hnp.arrays(np.float32, num_rows, elements=st.floats(-9, 9, width=32))) * trained.any(axis=1)
    if draw(st.booleans()):
        mask = np.concatenate([exists["prompt"], exists["response"]], axis=1).astype(np.int64)
        batch = {
            "prompts": ids["prompt"],
            "responses": ids["response"],
            "input_ids": np.concatenate([ids["prompt"], ids["response"]], axis=1),
            "attention_mask": mask,
            "position_ids": np.clip(np.cumsum(mask, axis=1) - 1, 0, None),
            "response_mask": trained.astype(np.int64),
            "old_log_probs": values,
            "advantages": rows[:, None] * trained,
        }
        return {name: torch.from_numpy(value) for name, value in batch.items()}, VERL
    batch = {
        "prompt_ids": ids["prompt"],
        "prompt_mask": exists["prompt"],
        "completion_ids": ids["response"],
        "completion_mask": exists["response"].astype(np.int32),
        "tool_mask": trained | ~exists["response"],
        "old_per_token_logps": values,
        "advantages": rows,
    }
    return {name: torch.from_numpy(value) for name, value in batch.items()}, TRL


@given(batches())
def test_any_batch_survives_a_round_trip(drawn: tuple[Batch, PaddedLayout]) -> None:
    batch, layout = drawn
    nested = nest(batch, layout, vocab_size=70001)
    validate(nested.columns)
    assert_same(unnest(nested.columns, layout, nested.geometry, PAD), batch)
    assert nested.coverage.dense == ()
    assert nested.coverage.padded_bytes == sum(value.nbytes for value in batch.values())
