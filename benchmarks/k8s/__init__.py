"""Kubernetes on this machine, for benchmarks and tests: nodes, a stand-in of its API server, or its own programs."""
