"""Which call the main thread of a worker runs, and which it must not: the control thread drops calls that wait.

A module of its own because two threads meet here, and nothing else that they share is decided under a lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

KEPT_FINISHED = 1024
"""Ended calls that are remembered, for cancels that come too late."""


class RunningCall(msgspec.Struct, frozen=True):
    """The call that the main thread runs."""

    id: int
    endpoint: str
    since: float
    """In monotonic time."""


class Claims:
    """Decides whether a call starts or is dropped. running: None between calls."""

    def __init__(self) -> None:
        self.running: RunningCall | None = None
        self.finished: deque[int] = deque(maxlen=KEPT_FINISHED)
        self._dropped: set[int] = set()
        """Calls that were answered for by the control thread; they must not run when they come."""
        self._lock = threading.Lock()

    def start(self, call: int, endpoint: str) -> bool:
        """Whether the call is to run, on the main thread; not when it was dropped."""
        with self._lock:
            if call not in self._dropped:
                self.running = RunningCall(call, endpoint, time.monotonic())
                return True
            self._dropped.discard(call)
        return False

    def cancel(self, call: int) -> tuple[RunningCall | None, bool]:
        """The call, if it runs; else whether it is dropped now, since it has not come. Neither when it has ended."""
        with self._lock:
            running = self.running
            if running is not None and running.id == call:
                return running, False
            if call in self.finished or call in self._dropped:
                return None, False
            self._dropped.add(call)
            return None, True
