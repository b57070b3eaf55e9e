"""The embedded engine: a transformers model that decodes in batches, in the rollout worker's process."""
