"""What the notebook and the ranks tell each other of tensors: operations, their lines, how tensors lie."""
