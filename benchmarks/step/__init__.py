"""Whole GRPO steps of real runs: rollout and training in turn, or overlapped (one-step off-policy)."""
