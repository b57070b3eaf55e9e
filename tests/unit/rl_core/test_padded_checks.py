"""Fields that a padded batch must not have, and the report of all fields."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from rl_core.padded import nest, unnest
from rl_core.padded.layouts import TRL, VERL, PaddedLayout
from schemas.errors import ColumnError
from tests.unit.rl_core.padded_batches import (
    LAYOUTS,
    PAD,
    RESPONSE_EXISTS,
    VOCAB,
    Batch,
    as_dict,
    as_tensordict,
    assert_same,
    logprobs,
    trl_batch,
    verl_batch,
)


def test_float64_that_float32_can_not_hold_is_rejected() -> None:
    batch = verl_batch()
    batch["old_log_probs"] = logprobs(-2).double() + 1e-12
    with pytest.raises(ColumnError, match=r"'old_log_probs': .* float64 values don't fit float32 exactly"):
        nest(batch, VERL, vocab_size=VOCAB)


@pytest.mark.parametrize("vocab_size", [34, 2**17])
def test_ids_are_below_the_vocabulary_size(vocab_size: int) -> None:
    batch = trl_batch()
    if vocab_size > 2**16:
        batch["completion_ids"][0, 0] = vocab_size
    with pytest.raises(ColumnError, match=rf"'completion_ids': .* to {vocab_size}, expected 0 to {vocab_size - 1}"):
        nest(batch, TRL, vocab_size=vocab_size)
    nested = nest(batch, TRL, vocab_size=vocab_size + 1)
    assert str(nested.columns.column("response_ids").type.value_type) == ("uint16" if vocab_size == 34 else "int32")
    assert_same(unnest(nested.columns, TRL, nested.geometry, PAD), batch)


@pytest.mark.parametrize("value", [-1, 70000])
def test_an_id_that_the_narrow_dtype_can_not_hold_is_rejected(value: int) -> None:
    batch = trl_batch()
    batch["prompt_ids"][3, 0] = value
    with pytest.raises(ColumnError, match="'prompt_ids': token ids range from"):
        nest(batch, TRL, vocab_size=VOCAB)


def test_a_trained_token_must_exist() -> None:
    batch = verl_batch()
    batch["response_mask"][1, 4] = 1
    with pytest.raises(
        ColumnError, match=r"'response_mask' trains 1 tokens that are masked by attention_mask, the first in row 1"
    ):
        nest(batch, VERL, vocab_size=VOCAB)


def test_advantages_must_be_constant_over_the_trained_tokens() -> None:
    batch = verl_batch()
    batch["advantages"][0, 3] = 9.0  # a tool token
    assert nest(batch, VERL, vocab_size=VOCAB).columns.column("advantages")[0].as_py() == 0.5
    for value in (0.75, float("nan")):
        batch["advantages"][0, 1] = value
        with pytest.raises(ColumnError, match="'advantages': values are not constant over the trained tokens of row 0"):
            nest(batch, VERL, vocab_size=VOCAB)


@pytest.mark.parametrize(("name", "position"), [("input_ids", 2), ("input_ids", 4), ("position_ids", 7)])
def test_a_derived_field_that_would_be_rebuilt_differently_is_rejected(name: str, position: int) -> None:
    batch = verl_batch()
    batch[name][0, position] += 1
    was = batch[name][0, position]
    message = f"{name!r} is {was} at row 0, position {position}, expected {was - 1}, its rebuilt value; 1 values"
    with pytest.raises(ColumnError, match=message):
        nest(batch, VERL, vocab_size=VOCAB)


@pytest.mark.parametrize("num_channels", [3, 4])
def test_position_ids_of_vision_models_are_stored_by_channel(num_channels: int) -> None:
    batch = verl_batch()
    exists = batch["attention_mask"][:, None]
    batch["position_ids"] = torch.arange(4 * num_channels * 8).reshape(4, num_channels, 8) * exists
    nested = nest(batch, VERL, vocab_size=VOCAB)
    assert {f"prompt_positions_{num_channels - 1}", "response_positions_0"} <= set(nested.columns.schema.names)
    assert {entry.name: entry.disposition for entry in nested.coverage.fields}["position_ids"] == "jagged"
    assert_same(unnest(nested.columns, VERL, nested.geometry, PAD), batch)
    batch["position_ids"] = batch["position_ids"][..., 1:]
    with pytest.raises(ColumnError, match=rf"'position_ids': it has shape .*7\], expected \[4, {num_channels}, 8\]"):
        nest(batch, VERL, vocab_size=VOCAB)


def test_advantages_of_a_critic_are_kept_by_token() -> None:
    batch = verl_batch()
    batch["advantages"] = logprobs(-8) * RESPONSE_EXISTS
    with pytest.raises(ColumnError, match="declare the field in token_fields"):
        nest(batch, VERL, vocab_size=VOCAB)
    by_token = {"advantages": "token_advantages"}
    nested = nest(batch, VERL, vocab_size=VOCAB, token_fields=by_token)
    assert "advantages" not in nested.columns.schema.names
    assert_same(unnest(nested.columns, VERL, nested.geometry, PAD), batch)
    with pytest.raises(ColumnError, match="can't become 'reward', which is on the row axis"):
        nest(batch, VERL, vocab_size=VOCAB, token_fields={"advantages": "reward"})


@pytest.mark.parametrize("form", [as_dict, as_tensordict])
def test_strict_names_every_field_that_would_stay_dense(form: Callable[[Batch], Mapping[str, Any]]) -> None:
    batch = verl_batch() | {"routes": torch.zeros(4, 5), "teacher": torch.zeros(4, 5, dtype=torch.float64)}
    with pytest.raises(ColumnError) as error:
        nest(form(batch), VERL, vocab_size=VOCAB)
    message = str(error.value)
    assert "2 fields would stay dense, because the verl layout does not know them" in message
    assert "routes [4, 5] float32, 80 bytes" in message
    assert "teacher [4, 5] float64, 160 bytes" in message
    assert "prompts" not in message
    assert "row_scalars" in message


def test_dense_fields_are_reported_if_not_strict() -> None:
    batch = verl_batch() | {"routes": torch.zeros(4, 5), "uid": ["a", "bc", "d", "e"], "raw": [{}, {}, {}, {}]}
    nested = nest(batch, VERL, vocab_size=VOCAB, strict=False)
    assert [(e.name, e.shape, e.dtype, e.padded_bytes, e.stored_bytes) for e in nested.coverage.dense] == [
        ("routes", (4, 5), "float32", 80, 0),
        ("uid", (4,), "text", 5, 0),
        ("raw", (4,), "list", None, 0),
    ]
    assert_same(unnest(nested.columns, VERL, nested.geometry, PAD), verl_batch())


def test_values_of_other_types_are_dense_too() -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    things = {
        "ragged": ragged,
        "objects": np.array([{}, [], None, 1], dtype=object),
        "sub": TensorDict({"x": torch.zeros(4)}, batch_size=[4]),
        "name": "run",
        "nothing": None,
    }
    nested = nest(verl_batch() | things, VERL, vocab_size=VOCAB, strict=False)
    assert {entry.name for entry in nested.coverage.dense} == things.keys()
    assert "5 fields stay dense" in str(nested.coverage)
    with pytest.raises(ColumnError, match="5 fields would stay dense"):
        nest(verl_batch() | things, VERL, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("changes", "row_scalars", "message"),
    [
        ({}, {"score": "reward"}, "the verl batch lacks score"),
        ({"score": torch.zeros(4, 5)}, {"score": "reward"}, r"'score' has shape \[4, 5\], expected \[4\]"),
        ({"score": torch.zeros(4)}, {"score": "loss_mask"}, "can't become 'loss_mask', which is on the response axis"),
        ({"score": torch.zeros(4)}, {"score": "color"}, "'color' is not in the catalog"),
        ({"score": torch.zeros(4)}, {"score": "advantages"}, "more than one field becomes advantages"),
        ({"score": [0.0] * 4}, {"score": "reward"}, "'score' is a list, expected a tensor"),
        ({"score": np.array(list("abcd"))}, {"score": "reward"}, "'score' is a ndarray, expected"),
        ({"group": torch.tensor([0, 0, 1, 2**31])}, {"group": "group_id"}, "'group': 1 of 4 int64 values"),
        ({"uid": ["a"] * 3}, {"uid": "sample_id"}, "'uid': 3 values of type str, expected 4"),
        ({"uid": ["a", 1, "b", None]}, {"uid": "sample_id"}, "'uid': 4 values of type NoneType, int, str"),
        ({"responses": torch.zeros(4, 6)}, {}, r"'input_ids' has shape \[4, 8\], expected \[4, 9\] to match 'prompts'"),
        ({"prompts": torch.zeros(4)}, {}, "token ids have shapes"),
        ({"ref_log_prob": torch.zeros(4, 8)}, {}, r"'ref_log_prob' has shape \[4, 8\], expected \[4, 5\]"),
        ({"attention_mask": torch.full((4, 8), 2)}, {}, "'attention_mask': a mask has values from 2 to 2"),
        ({"response_mask": torch.zeros(4, 5)}, {}, r"'response_mask': a mask is float32\[4, 5\]"),
    ],
)
def test_a_field_that_is_not_as_declared_is_rejected(changes: Batch, row_scalars: dict[str, str], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        nest(verl_batch() | changes, VERL, vocab_size=VOCAB, row_scalars=row_scalars)


@LAYOUTS
def test_ids_and_masks_are_required(make: Callable[[], Batch], layout: PaddedLayout) -> None:
    for name in (*layout.ids.values(), *layout.masks):
        batch = make()
        del batch[name]
        with pytest.raises(ColumnError, match=f"the {layout.name} batch lacks {name}"):
            nest(batch, layout, vocab_size=VOCAB)


def test_the_report_accounts_for_every_byte() -> None:
    batch = verl_batch() | {"routes": torch.zeros(4, 5)}
    report = nest(batch, VERL, vocab_size=VOCAB, strict=False).coverage
    dispositions = {entry.name: entry.disposition for entry in report.fields}
    assert dispositions == {
        "prompts": "jagged",
        "responses": "jagged",
        "input_ids": "derived",
        "attention_mask": "derived",
        "position_ids": "derived",
        "response_mask": "jagged",
        "rollout_log_probs": "jagged",
        "old_log_probs": "jagged",
        "ref_log_prob": "jagged",
        "advantages": "row",
        "token_level_scores": "jagged",
        "token_level_rewards": "jagged",
        "returns": "jagged",
        "values": "jagged",
        "entropys": "jagged",
        "routes": "dense",
    }
    sizes = {entry.name: (entry.padded_bytes, entry.stored_bytes) for entry in report.fields}
    offsets = 4 * 8  # Arrow counts one per row
    assert sizes["prompts"] == (4 * 3 * 8, 6 * 2 + offsets)
    assert sizes["response_mask"] == (4 * 5 * 8, 2 + offsets)  # 12 bits
    assert sizes["old_log_probs"] == (4 * 5 * 4, 12 * 4 + offsets)
    assert sizes["advantages"] == (4 * 5 * 4, 4 * 4)
    assert sizes["attention_mask"] == (4 * 8 * 8, 4 + 3 + 3 + 4 + 3 + 3)  # runs per row, starts, stops; both axes
    assert sizes["input_ids"] == sizes["position_ids"] == (4 * 8 * 8, 0)
    assert report.padded_bytes == sum(value.nbytes for value in batch.values())
    assert report.stored_bytes == sum(stored for _, stored in sizes.values())
    assert report.ratio == report.padded_bytes / (report.stored_bytes + 80)


def test_the_report_reads_as_a_table() -> None:
    report = nest(trl_batch(), TRL, vocab_size=VOCAB).coverage
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "field",
        "disposition",
        "column",
        "shape",
        "dtype",
        "padded",
        "bytes",
        "stored",
        "bytes",
    ]
    assert lines[1].split() == ["prompt_ids", "jagged", "prompt_ids", "[4,", "3]", "int64", "96", "44"]
    assert len(lines) == len(trl_batch()) + 3
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-2].split() == ["total", str(report.padded_bytes), str(report.stored_bytes)]
    assert lines[-1] == f"{report.ratio:.1f} times smaller, 0 fields stay dense"


def test_a_long_batch_shrinks_to_about_its_fill() -> None:
    exists = torch.zeros(64, 1000, dtype=torch.long)
    exists[:, :100] = 1
    batch = {
        "prompt_ids": torch.zeros(64, 1000, dtype=torch.long),
        "prompt_mask": exists.flip(1),
        "completion_ids": torch.zeros(64, 1000, dtype=torch.long),
        "completion_mask": exists,
        "old_per_token_logps": torch.zeros(64, 1000),
    }
    assert (
        nest(batch, TRL, vocab_size=VOCAB).coverage.ratio > 40
    )  # from 36 bytes per position to 8.1 per token, at 10 % fill


def test_a_column_that_is_missing_or_has_other_rows_is_rejected() -> None:
    nested = nest(verl_batch(), VERL, vocab_size=VOCAB)
    with pytest.raises(ColumnError, match="the columns lack advantages"):
        unnest(nested.columns.drop_columns(["advantages"]), VERL, nested.geometry, PAD)
    with pytest.raises(ColumnError, match="has 3 rows, expected 4"):
        unnest(nested.columns.slice(1), VERL, nested.geometry, PAD)
    with pytest.raises(ColumnError, match="has 2 values in row 0, expected 5"):
        unnest(nested.columns.take(pa.array([1, 0, 2, 3])), VERL, nested.geometry, PAD)
