"""Arrow columns: building and inspecting them, their schema, and how a chunk of them is encoded."""
