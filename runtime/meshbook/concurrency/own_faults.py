"""Faults of our own on threads that must not end by them: told once in full, as ours, and counted.

Users' errors are answers to calls, and what a peer sends that it must not costs that peer its link. What is left is a
fault of ours: it costs the action or the message that met it, never the thread, since all meshes hang on that.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable

REPEAT_S = 60.0
"""A fault at the same place is told again after so long only: a timer may meet it many times a second."""

WORDS = "meshbook: a fault of its own in"
"""What each report of a fault begins with."""

_told: dict[tuple[str, int], float] = {}


def tell(error: BaseException, what: str) -> None:
    """Say on stderr that ``error`` is a fault of ours, with its traceback; never raises. what: where it was met."""
    entries = traceback.extract_tb(error.__traceback__)
    place = (entries[-1].filename, entries[-1].lineno or 0) if entries else ("", 0)
    now = time.monotonic()
    if now < _told.get(place, 0.0):
        return
    _told[place] = now + REPEAT_S
    text = "".join(traceback.format_exception(error))
    try:
        print(f"{WORDS} {what}; it goes on. Please report this:\n{text}", file=sys.stderr)
    except Exception:  # stderr is closed, or cannot write it
        pass


def attempt(action: Callable[[], object], what: str, fail: Callable[[Exception], object] | None = None) -> bool:
    """Run ``action``; whether it ended well. What it raises goes to ``fail``, who waits for it; else it is told."""
    try:
        action()
    except Exception as error:
        pass_on(error, what, fail)
        return False
    return True


def pass_on(error: Exception, what: str, fail: Callable[[Exception], object] | None) -> None:
    """Hand ``error`` to ``fail``, who waits for what has failed; tell it where nobody does."""
    if fail is None:
        tell(error, what)
    else:
        attempt(functools.partial(fail, error), what)
