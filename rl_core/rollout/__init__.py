"""Rollout logic without an engine: `dynamic_sampling`, held-out metrics (`evaluation`) and seeds (`seeding`)."""
