"""The public handles: hosts, meshes of processes, and the functions that start, attach, repair and resize them."""
