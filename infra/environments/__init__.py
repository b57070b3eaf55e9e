"""Environments in processes of their own, the tokens between turns, and trajectories."""
