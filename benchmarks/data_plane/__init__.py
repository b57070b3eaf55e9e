"""How long the data plane takes for one batch, next to its peers, in separate processes on one local Ray.

Every path starts from the container that its users hold (Arrow columns, nested or padded tensors) and ends in the
same packed tensors in another process. `sluice bench data-plane`, or `python -m benchmarks.data_plane`.
"""
