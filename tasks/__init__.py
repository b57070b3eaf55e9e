"""The stages of a step, each a thin Prefect task."""

import infra  # noqa: F401  it sets what torch and Ray read when they are imported
