"""The time machine: steps of a run computed again from its stored columns, and runs that branch off from one."""
