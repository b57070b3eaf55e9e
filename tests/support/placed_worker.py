"""A worker that only says where it is; it imports torch late, as few of its tests need it."""

import os

import ray

from infra.ray.device import choose_device
from schemas.step import RunHandle


class Probe:
    def __init__(self, run: RunHandle, number: int) -> None:
        pass

    def where(self) -> tuple[str, str, list[str]]:
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), gpus

    def device(self) -> str:
        return str(choose_device())
