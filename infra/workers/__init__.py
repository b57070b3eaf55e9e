"""The run's Ray actors (policy, reference and rollout workers), and how they are found or created.

Imports every role's class, so it is heavy, but no heavier than any one of its modules.
"""

from infra.workers.launch import find_group, get_group, get_worker, kill_workers, rollout_pool

__all__ = ["find_group", "get_group", "get_worker", "kill_workers", "rollout_pool"]
