"""Columns in the memory of a run's nodes: an index, the files of each node, and their transfer between nodes."""
