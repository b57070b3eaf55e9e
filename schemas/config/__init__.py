"""Run configuration: frozen pydantic models; the `kind` of a section selects one of several classes."""

DEFAULT_RUNS_DIR = "runs"  # here, where `sluice --help` finds it without pydantic
