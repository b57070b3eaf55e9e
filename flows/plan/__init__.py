"""What `sluice plan` says of a run before it starts: rows, micro-batches, memory, and what to change."""
