"""The next kernel of a notebook finds its meshes."""
