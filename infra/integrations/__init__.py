"""What meets other libraries and programs: environments of other libraries, and a tool that runs Python.

A config names them by their path, such as `infra.integrations.gymnasium:GymnasiumEnvironment`. They need their own
library, the standard one and `rl_core.environments`, so that an interpreter of their own can run them. Tried with:
Gymnasium 1.4.0, TextArena 0.7.4, OpenEnv 0.10.0, verifiers 0.4.0; the Python tool with Linux 6.18 on x86_64.
"""
