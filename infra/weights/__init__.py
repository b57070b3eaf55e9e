"""Publishing weights: in buckets, from the policy's rank 0 to the rollout workers.

Workers send and receive through `infra.weights.endpoint.WeightSyncEndpoint`. It is not imported here, because it brings
in torch, which the driver's side, below, doesn't need.
"""

from infra.weights.sync import choose_route, sync_weights

__all__ = ["choose_route", "sync_weights"]
