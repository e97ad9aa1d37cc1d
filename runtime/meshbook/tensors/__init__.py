"""Tensors across a mesh, written as if on one machine: handles here, DTensors on the ranks."""
