"""Run configuration: frozen pydantic models; a union's member is chosen by its `kind`."""
