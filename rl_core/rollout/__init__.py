"""Rollout logic without an engine: chats as tokens, `dynamic_sampling`, held-out metrics (`evaluation`) and seeds."""
