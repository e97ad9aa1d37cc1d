"""The controller's process: sockets, calls, the state of hosts and meshes, recovery of groups."""
