"""Everything below the tasks that has side effects: Ray, stores, engines, models, checkpoints, local services."""

import os

# Ray 2.60 heads require a token, and a driver sends one only if this is set before Ray is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
