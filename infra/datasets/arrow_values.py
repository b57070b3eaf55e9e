"""Values of Arrow columns as JSON has them: what a JSONL file with the same rows would give."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

Decoder = Callable[[Any], Any]

_BINARY = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)


def value_decoder(type_: pa.DataType) -> Decoder | None:
    """Return what makes a JSON value of a value that `to_pylist` gives for an Arrow type; None: it is one already.

    Decimals, dates, times and binary become text, float16 and float32 the shortest number of their own type, and the
    extension type `arrow.json`, the `Json` of Hugging Face datasets, what its text says.

    Raises:
        ValueError: By the decoder; binary isn't UTF-8, or a JSON text is none.
    """
    decode = _decoder_within(type_)
    return None if decode is None else lambda value: None if value is None else decode(value)


def _decoder_within(type_: pa.DataType) -> Decoder | None:
    if isinstance(type_, pa.BaseExtensionType):
        own: dict[str, Decoder] = {"arrow.json": json.loads, "arrow.uuid": str}
        return own.get(type_.extension_name) or _decoder_within(type_.storage_type)
    if pa.types.is_struct(type_):
        return _struct_decoder(type_)
    if pa.types.is_map(type_):
        of_value = value_decoder(type_.item_type) or _unchanged
        return lambda pairs: {str(key): of_value(value) for key, value in pairs}
    if pa.types.is_dictionary(type_):
        return _decoder_within(type_.value_type)
    if pa.types.is_nested(type_) and hasattr(type_, "value_type"):  # the kinds of lists
        of_item = value_decoder(type_.value_type)
        return of_item and (lambda items: [of_item(item) for item in items])
    return _scalar_decoder(type_)


def _struct_decoder(type_: pa.StructType) -> Decoder | None:
    of_field = {field.name: decode for field in type_ if (decode := value_decoder(field.type)) is not None}
    if not of_field:
        return None
    return lambda row: {name: of_field.get(name, _unchanged)(value) for name, value in row.items()}


def _scalar_decoder(type_: pa.DataType) -> Decoder | None:
    if pa.types.is_float16(type_):
        return lambda value: float(str(np.float16(value)))
    if pa.types.is_float32(type_):
        return lambda value: float(str(np.float32(value)))
    if pa.types.is_decimal(type_) or pa.types.is_duration(type_) or pa.types.is_interval(type_):
        return str
    if pa.types.is_date(type_) or pa.types.is_time(type_) or pa.types.is_timestamp(type_):
        return lambda value: value.isoformat()
    if any(is_one(type_) for is_one in _BINARY):
        return lambda value: value.decode()
    return None


def _unchanged(value: Any) -> Any:
    return value
