"""The IPython in which a rank runs cells, and what it shows."""
