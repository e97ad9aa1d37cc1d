"""Kubernetes on this machine, for benchmarks and tests: nodes, and a stand-in of its API server."""
