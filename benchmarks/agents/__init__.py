"""Trajectories of several turns: what environments' time costs, and what is computed again."""
