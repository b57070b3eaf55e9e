"""Everything below the tasks that has side effects: Ray, stores, engines, models, checkpoints, local services."""

from infra.variables import RAY_VARIABLES, TORCH_VARIABLES, reach_loopback_directly, set_variables

set_variables(TORCH_VARIABLES | RAY_VARIABLES)
reach_loopback_directly()
