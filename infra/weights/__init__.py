"""Publishing weights: one flat buffer per policy version, from the policy's first rank to the rollout workers."""
