"""What `sluice plan` says of a run before it starts: rows, memory, traffic, time, placement, and what to change."""
