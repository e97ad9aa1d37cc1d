"""The queries of a debug session (`meshbook.debug.dap_session`), as the control thread of a rank answers them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from meshbook.debug.pydevd import END_TIMEOUT_S, hidden_folders, load_pydevd
from meshbook.source.location import users_place
from meshbook.source.thread_frames import frame_of

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker
from meshbook.debug.dap_session import DebugSession

_changing = threading.Lock()
"""Held while a session begins or ends: pydevd is one per process."""


def debugged_place(worker: Worker) -> str:
    """Where the main thread stands at a breakpoint of the debugger; nothing where it does not."""
    session = worker.debug_session
    if session is None or not session.is_stopped:
        return ""
    return users_place(frame_of(worker.main_thread))


def debug_open(worker: Worker, id: str) -> dict[str, object]:
    """Begin session ``id``; one that there is ends. ``problem`` says why it cannot."""
    with _changing:
        if worker.debug_session is not None:
            worker.debug_session.end("another debugger has taken its place")
            worker.debug_session.join(2 * END_TIMEOUT_S)
        try:
            worker.debug_session = DebugSession(id, worker.gate.visit)
        except ImportError as error:
            return {"problem": f"no debugpy: {error}", "python": sys.executable}
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}", "python": ""}
        return {"problem": "", "hidden": hidden_folders()}


def debug_prepare(worker: Worker) -> dict[str, object]:
    """Import what `debug_open` needs: it takes a second, once."""
    try:
        load_pydevd()
    except ImportError as error:
        return {"problem": f"no debugpy: {error}", "python": sys.executable}
    return {"problem": ""}


def debug_read(worker: Worker, id: str, offset: int, wait_s: float) -> dict[str, object]:
    """See `DebugSession.read`."""
    session = worker.debug_session
    if session is None or session.id != id:
        return {"at": offset, "data": b"", "ended": "the rank does not know this session"}
    return session.read(offset, wait_s)


def debug_write(worker: Worker, id: str, offset: int, data: bytes) -> str:
    """See `DebugSession.write`; returns why it was not possible."""
    session = worker.debug_session
    if session is None or session.id != id or session.ended:
        return "the session has ended"
    try:
        session.write(offset, data)
    except OSError as error:
        return str(error)
    return ""


def debug_close(worker: Worker, id: str) -> None:
    """End session ``id``."""
    if worker.debug_session is not None and worker.debug_session.id == id:
        worker.debug_session.end("it was detached")


def debug_names(worker: Worker) -> list[tuple[str, str, str]]:
    """(name, type, value in short) of the rank's variables; no code of the values' own runs for it."""
    return [
        (name, type(value).__name__, _in_short(value))
        for name, value in list(worker.shell.namespace.items())
        if not name.startswith("_") and not isinstance(value, ModuleType)
    ]


def _in_short(value: object) -> str:
    if type(value) in (bool, int, float, complex, str, bytes, type(None)):
        return repr(value)[:200]
    if type(value) in (list, tuple, dict, set, frozenset):
        return f"{type(value).__name__} of {len(value)}"  # type: ignore[arg-type]
    shape, dtype = (getattr(value, name, None) if _is_array(value) else None for name in ("shape", "dtype"))
    return f"{type(value).__name__} {tuple(shape)}, {dtype}" if shape is not None else f"<{type(value).__qualname__}>"


def _is_array(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in ("torch", "numpy") and hasattr(value, "shape")


DEBUG_QUERIES: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (debug_prepare, debug_open, debug_read, debug_write, debug_close, debug_names)
}
