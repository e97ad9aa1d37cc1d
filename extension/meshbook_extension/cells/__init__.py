"""A mesh cell, from its text to its result."""
