"""The IPython in which a rank runs cells, and its output."""
