"""The relay of `benchmarks.faults`, for tests."""

from benchmarks.faults.relay import Relay

__all__ = ["Relay"]
