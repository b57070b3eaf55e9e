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
from rl_core.padded import Geometry, nest, unnest
from rl_core.padded.layouts import TRL, VERL, PaddedLayout
from schemas.errors import ColumnError

PAD = 0
VOCAB = 50000
Batch = dict[str, Any]

# B = 4, P = 3, R = 5. Row 0 calls a tool: its tokens 12 and 13 exist but are not trained. Row 1 has padding on both
# sides of its response, row 2 an empty prompt and response, row 3 no padding.
PROMPT_MASK = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
RESPONSE_EXISTS = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
RESPONSE_TRAINED = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
PROMPTS = torch.tensor([[0, 1, 2], [0, 0, 3], [0, 0, 0], [4, 5, 6]])
RESPONSES = torch.tensor([[10, 11, 12, 13, 14], [0, 20, 21, 0, 0], [0, 0, 0, 0, 0], [30, 31, 32, 33, 34]])
ADVANTAGES = torch.tensor([0.5, -1.25, 0.0, 2.0])


def logprobs(base: float) -> torch.Tensor:
    """A log-prob that tells its token: base - id / 100."""
    return (base - RESPONSES / 100) * RESPONSE_EXISTS


def verl_batch() -> Batch:
    attention_mask = torch.cat([PROMPT_MASK, RESPONSE_EXISTS], dim=1)
    return {
        "prompts": PROMPTS.clone(),
        "responses": RESPONSES.clone(),
        "input_ids": torch.cat([PROMPTS, RESPONSES], dim=1),
        "attention_mask": attention_mask,
        "position_ids": torch.clip(attention_mask.cumsum(dim=-1) - 1, min=0),
        "response_mask": RESPONSE_TRAINED.clone(),
        "rollout_log_probs": logprobs(-1),
        "old_log_probs": logprobs(-2),
        "ref_log_prob": logprobs(-3),
        "advantages": ADVANTAGES[:, None] * RESPONSE_TRAINED,
    }


def trl_batch() -> Batch:
    return {
        "prompt_ids": PROMPTS.clone(),
        "prompt_mask": PROMPT_MASK.clone(),
        "completion_ids": RESPONSES.clone(),
        "completion_mask": RESPONSE_EXISTS.clone(),
        "tool_mask": torch.where(RESPONSE_EXISTS == 1, RESPONSE_TRAINED, 1),
        "sampling_per_token_logps": logprobs(-1),
        "old_per_token_logps": logprobs(-2),
        "ref_per_token_logps": logprobs(-3),
        "advantages": ADVANTAGES.clone(),
        "num_items_in_batch": RESPONSE_TRAINED.sum(),
    }


def as_dict(batch: Batch) -> Mapping[str, Any]:
    return batch


def as_tensordict(batch: Batch) -> Mapping[str, Any]:
    return TensorDict(batch, batch_size=[])


def as_numpy(batch: Batch) -> Mapping[str, Any]:
    return {name: value.numpy() for name, value in batch.items()}


LAYOUTS = pytest.mark.parametrize(("make", "layout"), [(verl_batch, VERL), (trl_batch, TRL)], ids=["verl", "trl"])


def assert_same(actual: Batch, expected: Mapping[str, Any]) -> None:
    assert actual.keys() == set(expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], torch.as_tensor(value), rtol=0, atol=0, equal_nan=True, msg=name)


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
    assert value_dtypes(columns) == {
        "prompt_ids": "uint16",
        "response_ids": "uint16",
        "loss_mask": "bool",
        "sampler_logprobs": "float",
        "behavior_logprobs": "float",
        "reference_logprobs": "float",
        "advantages": "float",
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


def test_a_trained_token_must_exist() -> None:
    batch = verl_batch()
    batch["response_mask"][1, 4] = 1
    with pytest.raises(
        ColumnError, match=r"'response_mask' trains 1 tokens that are masked by attention_mask, the first in row 1"
    ):
        nest(batch, VERL, vocab_size=VOCAB)


def test_truncated_completions_masked_by_trl_have_no_tokens() -> None:
    batch = trl_batch()
    for name in ("completion_mask", "tool_mask"):
        batch[name][3] = 0
    nested = nest(batch, TRL, vocab_size=VOCAB)
    assert nested.columns.column("response_ids")[3].as_py() == []
    back = unnest(nested.columns, TRL, nested.geometry, PAD)
    assert back["completion_ids"][3].tolist() == [PAD] * 5
    assert back["tool_mask"][3].tolist() == [1] * 5


def test_advantages_must_be_constant_over_the_trained_tokens() -> None:
    batch = verl_batch()
    batch["advantages"][0, 3] = 9.0  # a tool token
    assert nest(batch, VERL, vocab_size=VOCAB).columns.column("advantages")[0].as_py() == 0.5
    for value in (0.75, float("nan")):
        batch["advantages"][0, 1] = value
        with pytest.raises(ColumnError, match="'advantages': values are not constant over the trained tokens of row 0"):
            nest(batch, VERL, vocab_size=VOCAB)


def test_a_row_without_trained_tokens_has_advantage_zero() -> None:
    batch = verl_batch()
    batch["response_mask"][1] = 0
    batch["advantages"][1] = 7.0
    assert nest(batch, VERL, vocab_size=VOCAB).columns.column("advantages").to_pylist() == [0.5, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(("name", "position"), [("input_ids", 2), ("input_ids", 4), ("position_ids", 7)])
def test_a_derived_field_that_would_be_rebuilt_differently_is_rejected(name: str, position: int) -> None:
    batch = verl_batch()
    batch[name][0, position] += 1
    was = batch[name][0, position]
    message = f"{name!r} is {was} at row 0, position {position}, expected {was - 1}, its rebuilt value; 1 values"
    with pytest.raises(ColumnError, match=message):
        nest(batch, VERL, vocab_size=VOCAB)


def test_position_ids_of_vision_models_are_rejected() -> None:
    batch = verl_batch()
    batch["position_ids"] = batch["position_ids"][:, None].expand(-1, 4, -1)
    with pytest.raises(
        ColumnError, match=r"'position_ids' has shape \[4, 4, 8\], expected \[4, 8\] to match 'prompts'"
    ):
        nest(batch, VERL, vocab_size=VOCAB)


@pytest.mark.parametrize("form", [as_dict, as_tensordict])
def test_strict_names_every_field_that_would_stay_dense(form: Callable[[Batch], Mapping[str, Any]]) -> None:
    batch = verl_batch() | {"entropys": torch.zeros(4, 5), "token_level_scores": torch.zeros(4, 5, dtype=torch.float64)}
    with pytest.raises(ColumnError) as error:
        nest(form(batch), VERL, vocab_size=VOCAB)
    message = str(error.value)
    assert "2 fields would stay dense, because the verl layout does not know them" in message
    assert "entropys [4, 5] float32, 80 bytes" in message
    assert "token_level_scores [4, 5] float64, 160 bytes" in message
    assert "prompts" not in message
    assert "row_scalars" in message


def test_dense_fields_are_reported_if_not_strict() -> None:
    batch = verl_batch() | {"entropys": torch.zeros(4, 5), "uid": ["a", "bc", "d", "e"], "raw": [{}, {}, {}, {}]}
    nested = nest(batch, VERL, vocab_size=VOCAB, strict=False)
    assert [(e.name, e.shape, e.dtype, e.padded_bytes, e.stored_bytes) for e in nested.coverage.dense] == [
        ("entropys", (4, 5), "float32", 80, 0),
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
    batch = verl_batch() | {"entropys": torch.zeros(4, 5)}
    report = nest(batch, VERL, vocab_size=VOCAB, strict=False).coverage
    fates = {entry.name: entry.disposition for entry in report.fields}
    assert fates == {
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
        "entropys": "dense",
    }
    sizes = {entry.name: (entry.padded_bytes, entry.stored_bytes) for entry in report.fields}
    offsets = 4 * 8  # as Arrow counts: one a row
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
    assert nest(batch, TRL, vocab_size=VOCAB).coverage.ratio > 40  # 36 bytes a position to 8.1 a token, 10 % fill


def test_a_column_added_later_becomes_its_field() -> None:
    batch = verl_batch()
    behavior = batch.pop("old_log_probs")
    nested = nest(batch, VERL, vocab_size=VOCAB)
    lengths = np.array([5, 2, 0, 5])
    added = nested.columns.append_column(
        "behavior_logprobs", jagged(behavior.numpy()[RESPONSE_EXISTS.numpy() == 1], lengths)
    )
    assert_same(unnest(added, VERL, nested.geometry, PAD), batch | {"old_log_probs": behavior})


def test_a_column_that_is_missing_or_has_other_rows_is_rejected() -> None:
    nested = nest(verl_batch(), VERL, vocab_size=VOCAB)
    with pytest.raises(ColumnError, match="the columns lack advantages"):
        unnest(nested.columns.drop_columns(["advantages"]), VERL, nested.geometry, PAD)
    with pytest.raises(ColumnError, match="has 3 rows, expected 4"):
        unnest(nested.columns.slice(1), VERL, nested.geometry, PAD)
    with pytest.raises(ColumnError, match="has 2 values in row 0, expected 5"):
        unnest(nested.columns.take(pa.array([1, 0, 2, 3])), VERL, nested.geometry, PAD)


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
    geometry = Geometry.canonical(columns, VERL, {"prompt": 3, "response": 4})
    batch = unnest(columns, VERL, geometry, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[9, 1, 2, 4, 5, 9, 9], [9, 9, 3, 6, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 3, 3, 3], [0, 0, 0, 1, 1, 1, 1]]
    assert batch["response_mask"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[0.5, 0, 0, 0], [-0.5, 0, 0, 0]]
    nested = nest(batch, VERL, vocab_size=VOCAB)
    assert nested.columns.select(columns.schema.names).equals(columns)
    with pytest.raises(ColumnError, match="row 0 has 2 values, more than the width 1"):
        Geometry.canonical(columns, VERL, {"prompt": 3, "response": 1})
    with pytest.raises(ColumnError, match="the columns lack prompt_ids"):
        Geometry.canonical(columns.select(["response_ids"]), VERL, {"prompt": 3, "response": 1})


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, PaddedLayout]:
    """A batch with any masks, and canonical padding, so that all of it must come back."""
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
