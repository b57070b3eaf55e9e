"""Whole GRPO steps of real runs: rollout and training in turn, and overlapped (one-step off-policy)."""
