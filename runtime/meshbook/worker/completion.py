"""Queries for whoever types: completion and inspection by the living rank, on side threads.

An object may do anything when it is looked at: raise, print, sleep. So each question is asked aside, and whoever asks
waits only for so long. A question that hangs is not asked again meanwhile. None means: no answer can be had.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meshbook.calls.rank_state import Completions

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker

T = TypeVar("T")

AT_ONCE_MAX = 8
"""So many side threads may hang in what they look at."""

_open: set[tuple[object, ...]] = set()
_changed = threading.Condition()

TURN_S = 0.1
"""How long the same question waits for the one before it."""


def complete(worker: Worker, code: str, cursor: int) -> Completions | None:
    """See `meshbook.shell.completer.complete`."""

    def answer() -> Completions:
        start, end, items = worker.shell.complete(code, cursor)
        return Completions(start, end, [(text, type, signature) for text, type, signature in items if _sendable(text)])

    return _answer(("complete", _looked_at(code, cursor)), answer)


def inspect(worker: Worker, code: str, cursor: int, detail: int) -> str | None:
    """What Shift-Tab shows, with ANSI colours; empty: there is no such name."""

    def answer() -> str:
        return worker.shell.inspect(code, cursor, detail).encode(errors="replace").decode()

    return _answer(("inspect", _looked_at(code, cursor)), answer)


def user_names(worker: Worker, prefix: str) -> list[str] | None:
    """The variables of the rank."""
    return _answer(("names",), lambda: [name for name in worker.shell.names(prefix) if _sendable(name)])


def _answer(key: tuple[object, ...], work: Callable[[], T]) -> T | None:
    """Answer unless the same question, by ``key``, or too many others are being answered."""
    with _changed:
        if not _changed.wait_for(lambda: key not in _open and len(_open) < AT_ONCE_MAX, TURN_S):
            return None
        _open.add(key)
    try:
        return _twice(work)
    except Exception:
        return None
    finally:
        with _changed:
            _open.discard(key)
            _changed.notify_all()


def _looked_at(code: str, cursor: int) -> str:
    """The line before the name that is being typed."""
    return re.sub(r"\w*$", "", code[:cursor].rpartition("\n")[2])


def _twice(work: Callable[[], T]) -> T:
    """The main thread may change what is being read; then once more."""
    try:
        return work()
    except RuntimeError:
        return work()


def _sendable(text: str) -> bool:
    """Names made by ``setattr`` may be anything, lone surrogates too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
