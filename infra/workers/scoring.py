"""Log-probs of stored responses: read the token columns, replay them packed, put one new column."""

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from infra.stores.base import ColumnStore
from rl_core.columns.jagged import as_tensor, jagged, offsets, row_lengths
from rl_core.planning.pack import pack
from rl_core.replay.forward import PackedRow, pack_row
from rl_core.replay.logprobs import packed_logprobs
from schemas.batch import BatchHandle, ChunkKey
from schemas.config.packing import PackingConfig
from schemas.rollout import PutResult

TOKEN_COLUMNS = ("prompt_ids", "response_ids")


def packed_row(columns: pa.RecordBatch) -> PackedRow:
    """One packed row of all real tokens of `columns`, which hold `prompt_ids` and `response_ids`."""
    prompts, responses = columns["prompt_ids"], columns["response_ids"]
    return pack_row(as_tensor(prompts), row_lengths(prompts), as_tensor(responses), row_lengths(responses))


def score_column(
    model: PreTrainedModel,
    store: ColumnStore,
    batch: BatchHandle,
    column: str,
    key: ChunkKey,
    packing: PackingConfig,
    temperature: float,
) -> PutResult:
    """Put `column` (float32 nats, response axis): the log-probs of the batch's responses under `model`.

    Raises:
        PlanError: A row is over the token budget.
    """
    columns = store.read(batch, TOKEN_COLUMNS)
    prompt_lengths, response_lengths = (row_lengths(columns[name]) for name in TOKEN_COLUMNS)
    starts = offsets(columns["response_ids"])
    values = np.empty(int(response_lengths.sum()), dtype=np.float32)
    lengths = prompt_lengths + response_lengths
    for rows in pack(np.arange(batch.num_rows), lengths, packing.token_budget):
        with torch.no_grad():
            logprobs = packed_logprobs(
                model,
                packed_row(columns.take(pa.array(rows))),
                temperature=temperature,
                chunk_tokens=packing.logits_chunk_tokens,
            ).numpy()
        cuts = np.cumsum(response_lengths[rows])[:-1]
        for row, part in zip(rows, np.split(logprobs, cuts), strict=True):
            values[starts[row] : starts[row + 1]] = part
    stored = pa.record_batch({column: jagged(values, response_lengths)})
    chunk = store.put(key, stored, batch)
    store.flush()
    return PutResult(chunk=chunk, dtypes={column: "float"}, traffic=store.take_traffic(key.stage))
