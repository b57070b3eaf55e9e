"""The data plane against baselines: moving one batch between processes on one local Ray.

Every path starts from the container that its users hold (Arrow columns, nested or padded tensors) and ends with the
same packed tensors in another process.
"""
