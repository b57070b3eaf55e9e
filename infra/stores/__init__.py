"""Column stores: where record batches wait between the stages of a step, and what they promise."""
