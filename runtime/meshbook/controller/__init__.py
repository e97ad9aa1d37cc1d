"""The controller's process: sockets, calls, what it knows of hosts and meshes, recovery of groups."""
