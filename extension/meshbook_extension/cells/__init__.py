"""The run of a mesh cell, from its text to its result."""
