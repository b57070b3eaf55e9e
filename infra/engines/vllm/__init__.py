"""vLLM as a rollout engine: what is vLLM's alone of an engine that is a program.

`vllm_program` and `vllm_ranks` are loaded by file in vLLM's own interpreter, which has nothing of Sluice.
"""
