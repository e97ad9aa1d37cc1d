"""Training that goes on when ranks end: by a loop over mesh tensors, and by functions that run on the ranks."""
