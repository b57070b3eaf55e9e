"""The cost of orchestration: what a step of a real run takes beside rollout, scoring and update."""
