"""The run's Ray actors (policy, reference and rollout workers), and how they are found or created."""

from infra.workers.launch import find_group, get_group, get_worker, kill_workers, rollout_pool

__all__ = ["find_group", "get_group", "get_worker", "kill_workers", "rollout_pool"]
