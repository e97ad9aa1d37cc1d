"""Completion and inspection: a living rank answers for cells that run on ranks, grammars for our own magics."""
