"""Processes: those for other people's code, which can be killed and end with their parent; garbage in our own."""
