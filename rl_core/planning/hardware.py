"""The machines that a run is planned for: GPU kinds by their vendor's figures, and clusters of them."""

import math
import re
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from schemas.base import Frozen
from schemas.errors import ConfigError

_CLUSTER = re.compile(r"(?:(\d+)x)?(\d+)x([\w-]+)", re.IGNORECASE)


@dataclass(frozen=True)
class GpuKind:
    """A GPU's published figures, and its share of the host memory of the system it usually is in."""

    memory_bytes: int  # its memory; a little less is usable
    peak_flops: float  # dense bfloat16 multiplications and additions per second
    float32_flops: float  # the same in float32, without TF32, as torch computes by default
    host_bytes: int  # its share of the node's host memory
    source: str  # where the figures are from


GB = 10**9
GPU_KINDS: dict[str, GpuKind] = {
    "A100-40GB": GpuKind(40 * GB, 312e12, 19.5e12, 128 * GB, "NVIDIA A100 (SXM), DGX A100"),
    "A100": GpuKind(80 * GB, 312e12, 19.5e12, 256 * GB, "NVIDIA A100 80GB (SXM), DGX A100"),
    "H100": GpuKind(80 * GB, 989e12, 67e12, 256 * GB, "NVIDIA H100 (SXM), DGX H100"),
    "H200": GpuKind(141 * GB, 989e12, 67e12, 256 * GB, "NVIDIA H200 (SXM), DGX H200"),
    "B200": GpuKind(180 * GB, 2250e12, 75e12, 256 * GB, "NVIDIA DGX B200"),
    # Host memory is that of a common server, as the vendor has none.
    "L40S": GpuKind(48 * GB, 362e12, 91.6e12, 96 * GB, "NVIDIA L40S; server assumed"),
    "L4": GpuKind(24 * GB, 121e12, 30.3e12, 64 * GB, "NVIDIA L4; server assumed"),
}


_OTHER_VARIANTS = {"PCIe", "NVL", "MIG"}  # words in a GPU's name: other figures than those of its kind


def find_gpu_kind(name: str) -> str | None:
    """Return the kind of `GPU_KINDS` of a GPU, from its name in CUDA; None if its figures are not known.

    Example:
        >>> find_gpu_kind("NVIDIA H100 80GB HBM3"), find_gpu_kind("NVIDIA A100-SXM4-80GB")
        ('H100', 'A100')
        >>> find_gpu_kind("NVIDIA L40"), find_gpu_kind("NVIDIA H100 PCIe")
        (None, None)
    """
    words = set(re.split(r"[\s-]+", name))
    return None if words & _OTHER_VARIANTS else next((kind for kind in GPU_KINDS if kind in words), None)


def gpu_peak_flops(name: str, dtype: str) -> float | None:
    """Return a GPU's published peak, in multiplications and additions per second; None if it is not known.

    Args:
        name: Its name in CUDA.
        dtype: The dtype of the matrices, such as `bfloat16`.
    """
    if (kind := find_gpu_kind(name)) is None or dtype not in ("bfloat16", "float16", "float32"):
        return None
    return GPU_KINDS[kind].float32_flops if dtype == "float32" else GPU_KINDS[kind].peak_flops


class Cluster(Frozen):
    """Nodes of one kind; figures are per node unless they say GPU. Without GPUs, the workers share the node's cores."""

    name: str
    num_nodes: PositiveInt
    gpus_per_node: NonNegativeInt
    gpu_bytes: NonNegativeInt  # of each GPU
    host_bytes: PositiveInt
    is_here: bool = False  # whether it is this machine

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a text such as `8xH100` or `2x8xH100` (nodes x GPUs x kind) describes.

    Raises:
        ConfigError: It is of another form, has no GPU, or names an unknown kind.

    Example:
        >>> cluster = parse_cluster("2x8xh100")
        >>> cluster.name, cluster.num_gpus, cluster.gpu_bytes
        ('2x8xH100', 16, 80000000000)
    """
    match = _CLUSTER.fullmatch(text)
    nodes, gpus = (int(match[1] or 1), int(match[2])) if match else (0, 0)
    if match is None or nodes < 1 or gpus < 1:
        raise ConfigError(
            f"--cluster {text!r} is not of the form [NODESx]GPUSxKIND; write e.g. 8xH100, or 2x8xH100 for two nodes"
        )
    kinds = {name.lower(): name for name in GPU_KINDS}
    if (name := kinds.get(match[3].lower())) is None:
        raise ConfigError(f"--cluster {text!r}: {match[3]} is not a known GPU; choose one of {', '.join(GPU_KINDS)}")
    kind = GPU_KINDS[name]
    return Cluster(
        name=f"{nodes}x{gpus}x{name}",
        num_nodes=nodes,
        gpus_per_node=gpus,
        gpu_bytes=kind.memory_bytes,
        host_bytes=gpus * kind.host_bytes,
    )


def format_bytes(num_bytes: float) -> str:
    """Return bytes for people, in binary units with three significant digits.

    Example:
        >>> format_bytes(0), format_bytes(1500), format_bytes(80e9)
        ('0 B', '1.46 KiB', '74.5 GiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = min(len(units) - 1, int(math.log(num_bytes, 1024)) if num_bytes >= 1 else 0)
    return f"{float(f'{num_bytes / 1024**power:.3g}'):,g} {units[power]}"
