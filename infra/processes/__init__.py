"""Processes for other people's code: they can be killed, and end with their parent."""
