"""Rollout engines: the embedded one, transformers' `generate`, continuous batching, and vLLM.

Needs neither Ray nor Prefect: `python -m benchmarks.rollout`.
"""
