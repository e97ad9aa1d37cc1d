"""SIGINT on a worker: raised in user code only, and only for the call that was meant.

The control thread receives a `Cancel` and sends SIGINT to the main thread, which wakes it from system calls, locks and
sleeps. Between the two the call may have ended, so the handler raises only while the very call that was cancelled runs,
and never inside our own critical sections (a half-written message would break the stream).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class InterruptGate:
    """Owns SIGINT on the main thread. ``target`` is set by the control thread, all else by the main thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._running = 0
        self._target = 0
        self._shields = 0
        self._held_back = False
        signal.signal(signal.SIGINT, self._on_sigint)

    def interrupt(self, call: int) -> None:
        """From the control thread: raise KeyboardInterrupt in ``call`` if it still runs."""
        self._target = call
        signal.pthread_kill(self._main, signal.SIGINT)

    @contextlib.contextmanager
    def running(self, call: int) -> Iterator[None]:
        """User code of ``call`` runs inside the block."""
        self._running, self._held_back = call, False
        try:
            yield
        finally:
            self._running = 0

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """An interrupt that arrives inside the block is raised at its end. No-op on other threads."""
        if threading.get_ident() != self._main:
            yield
            return
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
            if self._held_back and self._shields == 0 and self._running:
                self._held_back = False
                raise KeyboardInterrupt

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if not self._running or self._target != self._running:
            return
        if self._shields:
            self._held_back = True
        else:
            raise KeyboardInterrupt
