"""Ray, stores, engines, models, checkpoints and local services: everything below the tasks that touches the world."""

import os

# Ray 2.60 heads want a token, and a driver that is imported without this never sends one.
os.environ.setdefault("RAY_AUTH_MODE", "token")
