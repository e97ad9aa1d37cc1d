"""What a rank's process groups did while it was profiled: operations with their numbers, and waits for them.

Times are seconds of the monotonic clock.
"""

from __future__ import annotations

import time
from typing import NamedTuple

KEPT = 100_000
"""Operations, and waits, that one log remembers."""


class Operation(NamedTuple):
    """One operation. Members of a group give equal ones equal numbers."""

    epoch: int
    group: str
    name: str
    number: int
    is_collective: bool
    begun: float
    ended: float
    """When its end was noticed: at the latest by whoever waited for it."""


class Wait(NamedTuple):
    """A thread's wait for an operation."""

    thread: int
    what: str
    begun: float
    ended: float


class OperationLog:
    """The log of operations, which any thread may fill."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.wall_minus_monotonic_s = time.time() - time.monotonic()

    def add_operation(self, operation: Operation) -> None:
        if len(self.operations) < KEPT:
            self.operations.append(operation)

    def add_wait(self, wait: Wait) -> None:
        if len(self.waits) < KEPT:
            self.waits.append(wait)
