"""The return of a notebook's meshes in its next kernel."""
