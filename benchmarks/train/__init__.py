"""The benchmark of the trainer's forward and backward: packed, padded, row by row, and an ideal.

Needs neither Ray nor Prefect: `python -m benchmarks.train`.
"""
