"""The benchmark of rollout engines: the embedded one, transformers' `generate`, continuous batching, vLLM.

Needs neither Ray nor Prefect: `python -m benchmarks.rollout`.
"""
