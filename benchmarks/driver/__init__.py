"""The driver's own work in a step at a given scale, against fake workers: seconds by part, and peak memory."""
