"""Run configuration: frozen pydantic models; the `kind` of a section selects one of several classes."""
