"""The same batch in the padded layouts of verl and TRL."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from rl_core.columns.jagged import row_lengths
from rl_core.padded import Geometry
from rl_core.padded.layouts import TRL, VERL
from rl_core.padded.nesting import RunLengths
from schemas.catalog import Axis

PAD = 0
VOCAB = 50000
Batch = dict[str, Any]
# B = 4, P = 3, R = 5. Row 0 calls a tool: its tokens 12 and 13 exist but are not trained. Row 1 has padding on both
# sides of its response, row 2 has an empty prompt and response, row 3 has no padding.
PROMPT_MASK = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
RESPONSE_EXISTS = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
RESPONSE_TRAINED = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
PROMPTS = torch.tensor([[0, 1, 2], [0, 0, 3], [0, 0, 0], [4, 5, 6]])
RESPONSES = torch.tensor([[10, 11, 12, 13, 14], [0, 20, 21, 0, 0], [0, 0, 0, 0, 0], [30, 31, 32, 33, 34]])
ADVANTAGES = torch.tensor([0.5, -1.25, 0.0, 2.0])


def logprobs(base: float) -> torch.Tensor:
    """Return log-probs that identify their tokens: base - id / 100."""
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
        "token_level_scores": logprobs(-4) * RESPONSE_EXISTS,
        "token_level_rewards": logprobs(-5) * RESPONSE_EXISTS,
        "returns": ADVANTAGES[:, None] * RESPONSE_TRAINED,
        "values": logprobs(-6) * RESPONSE_EXISTS,
        "entropys": logprobs(-7) * RESPONSE_EXISTS,
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


def runs_of(lengths: np.ndarray, width: int, side: str = "right") -> RunLengths:
    """The mask of rows of these lengths, padded to a width on one side."""
    places = np.arange(width)[::-1] if side == "left" else np.arange(width)
    return RunLengths.from_mask(places < lengths[:, None])


def never_padded(columns: pa.RecordBatch, widths: Mapping[Axis, int]) -> Geometry:
    """The geometry of columns that were never padded, in verl's layout: prompts are padded on the left."""
    prompts, responses = row_lengths(columns["prompt_ids"]), row_lengths(columns["response_ids"])
    return Geometry(
        runs={
            "prompt": runs_of(prompts, widths["prompt"], "left"),
            "response": runs_of(responses, widths["response"]),
        },
        fields={name: entry for name, entry in VERL.fields.items() if entry.column in columns.schema.names},
        dtypes=dict.fromkeys([*VERL.masks, *VERL.derived], "int64"),
        scalars={},
    )
