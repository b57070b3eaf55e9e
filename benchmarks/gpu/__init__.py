"""The GPU checklist: kernels, utilization, memory, and whole runs on CUDA; `--twin` runs the same checks on the CPU."""
