"""An executed notebook as a script of torchrun: the parts of it, the text, and the proof that both do the same."""
