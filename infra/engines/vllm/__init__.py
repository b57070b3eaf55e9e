"""The vLLM engine.

`infra.engines.vllm.start.open_vllm` starts it. It is not imported here, because it brings in torch and transformers.
"""

from infra.engines.vllm.package import require_vllm, vllm_is_for_cpu

__all__ = ["require_vllm", "vllm_is_for_cpu"]
