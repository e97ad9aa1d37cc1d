"""The queries about prompts and debuggers; the control thread answers them while the main thread is stopped."""

from __future__ import annotations

import sys
import threading
import time
from bdb import BdbQuit
from types import ModuleType
from typing import TYPE_CHECKING

from meshbook.calls.rank_state import LastError
from meshbook.debug.dap_session import (
    END_TIMEOUT_S,
    DebugBytes,
    DebuggerStart,
    DebugSession,
    hidden_folders,
    is_suspended,
    load_pydevd,
)
from meshbook.errors import GroupAborted
from meshbook.errors.advice import Advice, set_advice
from meshbook.shell.failures import text_of
from meshbook.source.location import describe_frame, users_place
from meshbook.source.thread_frames import frame_of

if TYPE_CHECKING:
    from meshbook.worker.parts import WorkerParts


def pdb_prompt(worker: WorkerParts) -> list[object] | None:
    """Return the fields of the `meshbook.wire.messages.ranks.AtPrompt` at which the rank waits, if it does."""
    prompt = worker.shell.debugger.prompt
    return None if prompt is None else list(prompt)


def pdb_command(worker: WorkerParts, number: int, line: str) -> bool:
    """Type a line at prompt ``number``; return whether the rank waited there."""
    return worker.shell.debugger.command(number, line)


def pdb_break_in(worker: WorkerParts) -> str:
    """Have the main thread stop at its next line of the user's code; return its present activity."""
    debugger = worker.shell.debugger
    if worker.claims.running is None:
        return "idle"
    if not debugger.place:
        debugger.refusal = ""  # who asks for it is there
        worker.gate.visit(debugger.break_in)
    return describe_frame(frame_of(worker.main_thread))


def hold_deadlines(worker: WorkerParts, held: bool) -> None:
    """Hold the deadlines of collectives while some rank is stopped at a prompt, or let them run again."""
    worker.groups.hold_deadlines(held)


def meet_controller(worker: WorkerParts, *words: str) -> None:
    """Take over the words of another controller that has attached the mesh; free the mesh tensors of the one before."""
    set_advice(Advice(*words))
    worker.groups.on_new_controller()


def last_error(worker: WorkerParts) -> LastError | None:
    """Return the exception that a post-mortem would show, if there is one."""
    kept = worker.shell.last_error
    if kept is None:
        return None
    error = kept.error
    return LastError(
        type(error).__name__,
        text_of(error)[:500],
        time.monotonic() - kept.at,
        kept.call,
        freed=isinstance(error, (GroupAborted, KeyboardInterrupt, BdbQuit)),
        has_frames=error.__traceback__ is not None,
    )


# ---- visual debuggers (`meshbook.debug.dap_session`) -----------------------------------------------------------------

_changing = threading.Lock()  # held while a session begins or ends: pydevd is one per process


def debugged_place(worker: WorkerParts) -> str:
    """Return the place of the main thread if a visual debugger has stopped it; else an empty text."""
    return users_place(frame_of(worker.main_thread)) if is_suspended(threading.main_thread()) else ""


def debug_open(worker: WorkerParts, id: str) -> DebuggerStart:
    """Begin session ``id``, and end the one before."""
    with _changing:
        if worker.debug_session is not None:
            worker.debug_session.end("another debugger has taken its place")
            worker.debug_session.join(2 * END_TIMEOUT_S)
        worker.mail.turn.keep_private()  # it may stop the threads of actors
        try:
            worker.debug_session = DebugSession(id, worker.gate.visit)
        except ImportError as error:
            return DebuggerStart(f"no debugpy: {error}", sys.executable)
        except Exception as error:
            return DebuggerStart(f"{type(error).__name__}: {error}")
        return DebuggerStart(hidden=hidden_folders())


def debug_prepare(worker: WorkerParts) -> DebuggerStart:
    """Import the modules for `debug_open`: it takes a second, once."""
    try:
        load_pydevd()
    except ImportError as error:
        return DebuggerStart(f"no debugpy: {error}", sys.executable)
    return DebuggerStart()


def debug_read(worker: WorkerParts, id: str, offset: int, wait_s: float) -> DebugBytes:
    """See `DebugSession.read`."""
    session = worker.debug_session
    if session is None or session.id != id:
        return DebugBytes(offset, b"", "the rank does not know this session")
    return session.read(offset, wait_s)


def debug_write(worker: WorkerParts, id: str, offset: int, data: bytes) -> str:
    """See `DebugSession.write`; return why it was not possible."""
    session = worker.debug_session
    if session is None or session.id != id or session.ended:
        return "the session has ended"
    try:
        session.write(offset, data)
    except OSError as error:
        return str(error)
    return ""


def debug_close(worker: WorkerParts, id: str) -> None:
    """End session ``id`` if it is the one that runs."""
    if worker.debug_session is not None and worker.debug_session.id == id:
        worker.debug_session.end("it was detached")


def debug_names(worker: WorkerParts) -> list[tuple[str, str, str]]:
    """Return (name, type, value in short) of the rank's variables; no code of the values' own runs for it."""
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
    is_array = type(value).__module__.partition(".")[0] in ("torch", "numpy")
    shape, dtype = (getattr(value, name, None) if is_array else None for name in ("shape", "dtype"))
    return f"{type(value).__name__} {tuple(shape)}, {dtype}" if shape is not None else f"<{type(value).__qualname__}>"


QUICK = (pdb_prompt, pdb_command, pdb_break_in, hold_deadlines, last_error)
SLOW = (meet_controller, debug_prepare, debug_open, debug_read, debug_write, debug_close, debug_names)
