"""Environments: the protocol, and tools as an environment."""
