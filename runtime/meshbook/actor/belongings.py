"""What an actor has spawned: actors, and processes of `this_host`. It ends with the actor."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from meshbook.concurrency.future import Future
from meshbook.errors import MeshError

WAIT_S = 6.0
"""How long an actor that ends waits for what it owns; longer than one that does not heed an interrupt is waited for."""


class Owned(Protocol):
    """A mesh of actors or of processes."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped from this process."""

    def stop(self, reason: str = ...) -> Future[None]:
        """Begin its end; done when it has ended."""


class Belongings:
    """Of one actor. On any thread."""

    def __init__(self) -> None:
        self._owned: list[Owned] = []
        self._lock = threading.Lock()

    def add(self, owned: Owned) -> None:
        """The actor has spawned it."""
        with self._lock:
            self._owned = [one for one in self._owned if not one.is_stopped]
            self._owned.append(owned)

    def stop(self) -> None:
        """End all of it, and wait; what has ended before, or does not end in time, is left alone. Raises nothing."""
        with self._lock:
            owned, self._owned = self._owned, []
        ends = []
        for one in owned:
            with contextlib.suppress(MeshError):
                ends.append(one.stop("the actor that had spawned it was stopped"))
        until = time.monotonic() + WAIT_S
        for end in ends:
            with contextlib.suppress(MeshError, TimeoutError):
                end.get(max(0.0, until - time.monotonic()))
