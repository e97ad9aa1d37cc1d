"""The ranks' end of mesh tensors: DTensors by number, and how each operation is done on them."""
