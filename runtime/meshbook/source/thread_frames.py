"""The frames and exceptions of all threads.

Python's own functions for that hold a lock of the interpreter while they allocate, and an allocation may set the
collector off (until 3.11.8 and 3.12.2). If what it collects lets go of the GIL, as tensors do, whoever wants that lock
meanwhile has the GIL and never gives it back: the process stands still for good. So the collector is off meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_lock = threading.RLock()
"""Held by who has turned the collector off."""


def frames() -> dict[int, FrameType]:
    """Thread to its innermost frame, for all threads but the calling one.

    Its own frame would hold whoever keeps the answer, and so itself: a circle in which all variables of all threads
    would live on until the collector came by.
    """
    with _without_collector():
        found = sys._current_frames()
    del found[threading.get_ident()]
    return found


def frame_of(thread: int | None) -> FrameType | None:
    """The innermost frame of ``thread``, if it runs Python."""
    return sys._getframe(1) if thread == threading.get_ident() else frames().get(thread or 0)


def exception_of(thread: int) -> object:
    """What ``thread`` handles, as the running Python has it."""
    with _without_collector():
        return sys._current_exceptions().get(thread)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    with _lock:
        was_on = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if was_on:
                gc.enable()
