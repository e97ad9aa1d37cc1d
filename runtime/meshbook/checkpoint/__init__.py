"""Saves of the state that ranks hold, in the format of torch.distributed.checkpoint: written, found, read back."""
