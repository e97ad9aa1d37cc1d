"""gloo's threads are parked where gloo would end the process.

A gloo group has a thread that reads its connections. When more comes than the operation has room for (ranks disagree
on a size), that thread throws, nobody catches, and the C++ runtime calls abort(): the rank would die of a wrong shape.
So SIGABRT is answered: the thread of a group never comes back, its group is of no use any more, and the rest of the
process goes on. Whatever else aborts ends the process as ever, by the handler that was there before.

The thread may hold locks of its group, so a group that is lost in this way is never destroyed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from meshbook.system.descriptors import above_standard

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


_on_lost: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}
"""The kernel's numbers of threads, with what the groups that they are of do when they lose them."""
_before: int | None = None
"""The handler that was there before ours."""


def threads() -> set[int]:
    """All threads of the process that are not Python's."""
    known = {thread.native_id for thread in threading.enumerate()}
    with above_standard():
        return {int(entry) for entry in os.listdir("/proc/self/task")} - known


def park(gloos: Iterable[int], on_lost: Callable[[], object]) -> None:
    """From now on these threads do not end the process when gloo gives them up.

    on_lost: a method of their group, called on such a thread, which does not come back.
    """
    for number in [number for number, method in _on_lost.items() if method() is None]:
        del _on_lost[number]  # they have ended with their group, and the number may be another's
    _on_lost.update(dict.fromkeys(gloos, weakref.WeakMethod(on_lost)))
    _install()


def _on_abort(number: int) -> None:
    """On the thread that has called abort(), which ends the process when this returns."""
    method = _on_lost.get(threading.get_native_id())
    on_lost = method() if method is not None else None
    if on_lost is None:
        if _before:
            ctypes.cast(_before, _HANDLER)(number)
        return
    on_lost()
    del on_lost, method
    while True:
        time.sleep(3600)


_handler = _HANDLER(_on_abort)


def _install() -> None:
    global _before
    if _before is None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, _HANDLER), ctypes.c_void_p
        _before = libc.signal(signal.SIGABRT, _handler) or 0
