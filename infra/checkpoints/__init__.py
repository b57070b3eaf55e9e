"""Checkpoints of the policy: sharded safetensors under any fsspec URL, a manifest last. See docs/checkpoints.md."""

from infra.checkpoints.files import Manifest, best_version
from infra.checkpoints.store import CheckpointStore, PendingCheckpoint, open_checkpoints

__all__ = ["CheckpointStore", "Manifest", "PendingCheckpoint", "best_version", "open_checkpoints"]
