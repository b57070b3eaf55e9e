"""Rollout engines: the embedded one, transformers' `generate`, and vLLM; without Ray and Prefect."""
