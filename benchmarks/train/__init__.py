"""The trainer's forward and backward: packed, padded, row by row, and an ideal without padding.

Needs neither Ray nor Prefect: `python -m benchmarks.train`.
"""
