"""Extents, slices and views of ranks, and values by rank. Pure."""
