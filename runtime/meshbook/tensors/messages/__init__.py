"""Messages between the notebook and the ranks about tensors: operations, their lines, and layouts."""
