"""`compile`: a step that repeats is recorded, and becomes one message to the ranks."""
