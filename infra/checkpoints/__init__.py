"""Checkpoints of the policy: sharded safetensors under any fsspec URL, a manifest last. See docs/checkpoints.md."""
