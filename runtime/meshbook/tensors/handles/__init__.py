"""The notebook's end: mesh tensors, which are tensors to torch, and the meshes that they are on."""
