"""How near we are to Monarch: its public names, and small programs that run under both with another import."""
