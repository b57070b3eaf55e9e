"""Benchmarks of Sluice against baselines; they need a checkout and the extra `bench`."""

from infra.variables import LOCAL_RAY_VARIABLES, set_variables

set_variables(LOCAL_RAY_VARIABLES)  # as of a run's own Ray; before anything imports Ray
