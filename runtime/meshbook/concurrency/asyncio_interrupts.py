"""Interrupts of coroutines that await a mesh: in a notebook's cell, or in a script.

Whoever runs the event loop handles SIGINT by cancelling the task of the cell (ipykernel, `asyncio.run`). A handler in
Python does not wake an event loop that sleeps, so the cancellation would come when something else happens: seconds
later, or never. While a future is awaited on the main thread our handler stands before the other one: it notes the
press, lets the other do its work, and wakes the loop. `is_interrupt` then tells an interrupt from any other cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from types import FrameType

from meshbook.concurrency.sigint import SigintScope

LATELY_S = 2.0
"""A task that is cancelled so soon after an interrupt was cancelled by it."""


class _Watch:
    """The handler, while anything is awaited."""

    def __init__(self) -> None:
        self.awaited = 0
        self.pressed_at = float("-inf")
        self._scope = SigintScope(self._on_sigint)
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Another await; the first of them puts the handler in place."""
        if self._scope.is_in_place:
            self.awaited += 1
        elif self._scope.open():
            self.awaited, self._loop = 1, loop

    def end(self) -> None:
        """An await less; after the last the earlier handler is back, unless somebody has set another since."""
        self.awaited -= 1
        if self.awaited <= 0:
            self._scope.close()
            self._loop = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self.pressed_at = time.monotonic()
        loop, before = self._loop, self._scope.before
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None)
        if before is not None:
            before(signum, frame)


_watch = _Watch()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around an await: an interrupt reaches it at once. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch.begin(asyncio.get_running_loop())
    try:
        yield
    finally:
        _watch.end()


def is_interrupt(error: BaseException) -> bool:
    """Whether a task was cancelled because the person interrupted a moment ago, while something was awaited."""
    return isinstance(error, asyncio.CancelledError) and time.monotonic() - _watch.pressed_at < LATELY_S


def in_a_cell() -> bool:
    """Whether the running task is IPython's own for a cell: only there may KeyboardInterrupt be raised.

    IPython catches whatever its cell raises; out of any other task a KeyboardInterrupt would end the event loop.
    """
    task = asyncio.current_task()
    code = getattr(task.get_coro(), "cr_code", None) if task is not None else None
    return getattr(code, "co_name", "") == "run_cell_async"
