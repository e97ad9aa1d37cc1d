"""SIGINT on a worker: raised in user code only, and only for the call that was meant.

The control thread receives a `Cancel` and sends SIGINT to the main thread, which wakes it from system calls, locks and
sleeps. Between the two the call may have ended, so the handler raises only while the very call that was cancelled runs,
and never inside our own critical sections (a half-written message would break the stream).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class InterruptGate:
    """Owns SIGINT on the main thread. ``target`` is set by the control thread, all else by the main thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._running = 0
        self._target = 0
        self._held_back = False
        self.shield = _Shield(self)
        """``with gate.shield:`` an interrupt that arrives inside is raised at the end. No-op on other threads."""
        signal.signal(signal.SIGINT, self._on_sigint)

    def interrupt(self, call: int) -> None:
        """From the control thread: raise KeyboardInterrupt in ``call`` if it still runs."""
        self._target = call
        signal.pthread_kill(self._main, signal.SIGINT)

    @property
    def unheard(self) -> bool:
        """Whether the call that was meant still runs and has not noticed: then `interrupt` it again.

        A signal that arrives between the last look of the interpreter and the start of a system call is only noticed at
        the end of that call.
        """
        return self._target != 0 and self._target == self._running

    def repeat(self) -> None:
        """From the control thread: the same once more."""
        signal.pthread_kill(self._main, signal.SIGINT)

    def open(self, call: int) -> None:
        """User code of ``call`` runs from here."""
        self._running, self._held_back = call, False

    def close(self) -> None:
        """No user code runs any more: nothing is raised."""
        self._running = 0

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if not self._running or self._target != self._running:
            return
        self._target = 0
        if self.shield.depth:
            self._held_back = True
        else:
            raise KeyboardInterrupt

    def _raise_held_back(self) -> None:
        if self._held_back and self._running:
            self._held_back = False
            raise KeyboardInterrupt


class _Shield:
    """Counts how deep the main thread is in sections that must not be torn; on the path of every message."""

    __slots__ = ("_gate", "_main", "depth")

    def __init__(self, gate: InterruptGate) -> None:
        self._gate = gate
        self._main = threading.get_ident()
        self.depth = 0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self.depth -= 1
            if not self.depth:
                self._gate._raise_held_back()
