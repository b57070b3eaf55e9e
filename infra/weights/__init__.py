"""Publishing weights: one flat buffer per policy version, from the policy's rank 0 to the rollout workers.

Workers send and receive through `infra.weights.endpoint.WeightSyncEndpoint`. It is not imported here, because it brings
in torch, which the driver's side, below, doesn't need.
"""

from infra.weights.sync import sync_weights
from infra.weights.transport import choose_transport

__all__ = ["choose_transport", "sync_weights"]
