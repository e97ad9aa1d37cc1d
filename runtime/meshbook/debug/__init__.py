"""pdb and debugpy on ranks, and the person's end of both."""
