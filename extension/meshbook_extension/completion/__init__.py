"""Completion and inspection: of cells that run on ranks by a living rank, of our own magics by their grammars.

place      what stands at the cursor: code for ranks, a line of ours, or neither
words      what may follow in a line of ours
ranks      asks a rank
typist     puts the three together
replies    the same in Jupyter's words
hooks      makes a kernel, or a terminal's IPython, ask the typist first
busy       answers while the kernel's main thread is busy with a cell
"""
