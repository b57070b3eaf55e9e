"""What a run shows in Prefect's UI and in the terminal, and what it asks there."""
