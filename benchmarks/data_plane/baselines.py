"""TransferQueue, used on this batch as its users would use it."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from benchmarks.data_plane.batch import APPENDED, Ints, Packed, ReferenceBatch, pack_columns
from benchmarks.data_plane.paths import DataPath

NEW_COLUMN = "appended_logprobs"

Columns = dict[str, Any]  # nested tensors, tensors [N], and lists of N strings


class TransferQueue(DataPath):
    """Jagged nested tensors through TransferQueue's SimpleStorage in its default configuration.

    That is a controller and two storage units, used by the client's own `put` and `get_data` with a BatchMeta as the
    handle: on this batch, reads by key take up to twice as long, because they query the controller again.
    """

    name = "transfer_queue"
    units: ClassVar[int] = 2

    def prepare(self, batch: ReferenceBatch) -> None:
        import transfer_queue
        from omegaconf import OmegaConf

        storage = {"num_data_storage_units": self.units}
        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": storage}}))
        self._client = transfer_queue.get_client()
        columns, appended = self._containers(batch)
        self.num_bytes = payload_bytes(columns)
        self._columns, self._appended = (_tensordict(part, batch.columns.num_rows) for part in (columns, appended))

    def connect(self) -> None:
        import transfer_queue

        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def put(self, step: int) -> Any:
        return self._client.put(self._columns, partition_id=self._partition(step))

    def append(self, step: int, handle: Any) -> Any:
        return self._client.put(self._appended, metadata=handle)

    def fetch(self, handle: Any, order: Ints | None) -> Any:
        return self._client.get_data(handle if order is None else handle.select_samples(order.tolist()))

    def clear(self, step: int, handle: Any) -> None:
        self._client.clear_partition(self._partition(step))

    def close(self) -> None:
        import transfer_queue

        transfer_queue.close()

    def _partition(self, step: int) -> str:
        return f"{self.name}-{step}"

    def _containers(self, batch: ReferenceBatch) -> tuple[Columns, Columns]:
        source = pack_columns(batch.columns)
        columns = {name: _nested(*pair) for name, pair in source.tokens.items()}
        appended = _nested(*pack_columns(batch.appended).tokens[APPENDED])
        return {**columns, **source.rows, **source.strings}, {NEW_COLUMN: appended}

    def pack(self, fetched: Any, order: Ints | None) -> Packed:
        columns = dict(fetched.items())
        nested = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor) and value.is_nested}
        return Packed(
            tokens={name: _flat(value) for name, value in nested.items()},
            rows={"advantages": columns["advantages"]},
            strings={name: columns[name].tolist() for name in ("prompt_text", "response_text")},
        )

    def fetch_appended(self, handle: Any) -> Packed:
        nested = self._client.get_data(handle.select_fields([NEW_COLUMN]))[NEW_COLUMN]
        return Packed({APPENDED: _flat(nested)}, {}, {})


def payload_bytes(columns: Mapping[str, Any]) -> int:
    """Return the bytes of tensors and strings, without serialization overhead."""
    return sum(_num_bytes(value) for value in columns.values())


def _num_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(len(string.encode()) for string in value)
    flat = value.values() if value.is_nested else value
    return int(flat.numel() * flat.element_size())


def _nested(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(torch.split(values, lengths.tolist())), layout=torch.jagged)


def _flat(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return nested.values(), nested.offsets().diff()


def _tensordict(columns: Columns, num_rows: int) -> Any:
    from tensordict import NonTensorStack, TensorDict

    fields = {
        name: NonTensorStack.from_list(value) if isinstance(value, list) else value for name, value in columns.items()
    }
    return TensorDict(fields, batch_size=[num_rows])
