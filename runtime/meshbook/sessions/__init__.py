"""A session on disk: its folder, its lock, the list of all."""
