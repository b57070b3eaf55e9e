"""What a run keeps of its past steps, to ask (`sql`) and to compare (`diff`); neither needs Ray."""
