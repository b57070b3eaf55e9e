"""How a run's process goes on and ends: Ray's connection, outages, cancellation, and its exit."""
