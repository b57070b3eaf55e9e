"""The data plane against TransferQueue: one batch between two processes, to the same packed tensors."""
