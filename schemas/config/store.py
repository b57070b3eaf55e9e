"""Where columns live."""

from typing import Literal

from pydantic import PositiveInt

from schemas.base import Frozen


class RayStore(Frozen):
    """Ray's object store, with a registry actor that owns what is stored."""

    kind: Literal["ray"] = "ray"
    capacity_bytes: PositiveInt = 2**30


StoreConfig = RayStore
