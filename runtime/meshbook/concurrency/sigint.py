"""Interrupts that the person presses while we already deal with one.

During `noticed` SIGINT raises nothing: each press is counted and wakes whoever waits in `InterruptCounter.wait`. Only
on the main thread, where Python runs signal handlers; on others nothing is noticed, and nothing raises there either.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from meshbook.concurrency.future import Future


class InterruptCounter:
    """How often interrupt was pressed since the last look."""

    def __init__(self) -> None:
        self._count = 0
        self._wake: Future[None] = Future()

    def press(self, signum: int, frame: FrameType | None) -> None:
        """The handler. A future may be completed in the midst of anything."""
        self._count += 1
        self._wake.set_result(None)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        self._wake.set_result(None)

    def take(self) -> bool:
        """Whether there was a press; it is answered for now."""
        if not self._count:
            return False
        self._count = 0
        return True

    def wait(self, until: float) -> None:
        """Wait for `wake`, a press, or the moment ``until`` on the monotonic clock."""
        with contextlib.suppress(TimeoutError):
            self._wake.get(max(0.0, until - time.monotonic()))
        self._wake = Future()
        if self._count:
            self._wake.set_result(None)


@contextlib.contextmanager
def noticed() -> Iterator[InterruptCounter]:
    """Inside of the block presses are counted rather than raised."""
    interrupt_counter = InterruptCounter()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt_counter
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is None:  # not Python's: it cannot be put back
        yield interrupt_counter
        return
    signal.signal(signal.SIGINT, interrupt_counter.press)
    try:
        yield interrupt_counter
    finally:
        signal.signal(signal.SIGINT, handler)
