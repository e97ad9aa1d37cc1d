"""Scalars that programs log while they run: their way out of a rank, and the series that the controller keeps."""
