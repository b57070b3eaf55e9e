"""Environments of other libraries, one module per library, each of which imports that library only."""
