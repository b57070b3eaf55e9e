"""vLLM as a rollout engine: its process, as seen by the rollout worker that owns it."""
