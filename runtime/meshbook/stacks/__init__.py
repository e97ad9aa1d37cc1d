"""Stacks of ranks, as values and as text."""
