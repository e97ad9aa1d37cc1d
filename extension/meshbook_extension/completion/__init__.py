"""Completion and inspection: a living rank answers for cells that run on ranks, grammars for our own magics.

grammar       what stands at the cursor: code for ranks, a line of ours, or neither; what may follow in a line of ours
ranks         asks a rank
completer     puts the two together, and makes replies in Jupyter's words
hooks         makes a kernel, or a terminal's IPython, ask the completer first
while_busy    answers while the kernel's main thread is busy with a cell
"""
