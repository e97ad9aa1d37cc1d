"""A rank under a debugger: debugpy's tracer (pydevd) in this process, its bytes read and written by queries.

debugpy would listen at a TCP port that anyone on the host may use, or start an adapter with a token among its
arguments. Its tracer speaks the Debug Adapter Protocol itself, though, over any socket: it gets one end of a socketpair
that this module owns, and no port exists. The controller carries the bytes over its own links:

    debugger <-> controller  --debug_write-->  control thread, aside --> socketpair --> pydevd's own threads
                             <--debug_read---  (held until there is something, `WAIT_MAX_S` at most)

One piece is under way in each direction, of `PIECE_MAX_BYTES` at most, so nothing waits long behind a debugger. Pieces
are numbered by their offset: one that is asked for, or sent, again does no harm. A session of which nobody reads any
more ends after `LEASE_S`: a rank that is stopped goes on then.

pydevd has no public face for this: its loading, begin and end are written against debugpy 1.8, inner names included.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple, TypeAlias

from meshbook.concurrency.background import hidden_thread
from meshbook.concurrency.forks import at_fork
from meshbook.source.location import PACKAGE
from meshbook.system.descriptors import above_standard

PIECE_MAX_BYTES = 1 << 16
WAIT_MAX_S = 1.0
LEASE_S = 60.0
START_TIMEOUT_S = 15.0
_UNREAD_MAX_BYTES = 1 << 20

Visit: TypeAlias = Callable[[Callable[[FrameType | None], object]], None]
"""Has the main thread call a function with its frame when it looks at its signals next."""


class DebuggerStart(NamedTuple):
    """The answer to the wish for a debugger."""

    problem: str = ""
    """The reason why the rank has no debugger now."""
    python: str = ""
    """The interpreter that lacks debugpy."""
    hidden: tuple[str, ...] = ()
    """Folders of code that a person who steps through a cell does not want to see."""


class DebugBytes(NamedTuple):
    """A piece of the tracer's output."""

    at: int
    data: bytes
    ended: str
    """The reason why the session is over, once all was read."""


class DebugSession:
    """A debug session of this process."""

    def __init__(self, id: str, visit: Visit) -> None:
        """Start to trace. Raises: ImportError without debugpy; RuntimeError, OSError when it does not start."""
        self.id = id
        self.ended = ""
        """The reason why it has ended; empty while it lives."""
        self._visit = visit
        self._pydevd = load_pydevd()
        with above_standard():
            self._ours, self._theirs = socket.socketpair()
        self._changed = threading.Condition()
        self._unread = bytearray()
        self._unread_at = self._written = 0
        self._writing = threading.Lock()
        self._heard = time.monotonic()
        self._started = threading.Event()
        self._failure = ""
        self._thread = hidden_thread(self._run, "meshbook.debug")
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._failure:
            self.end("it did not start")
            raise RuntimeError(self._failure or f"it did not start within {START_TIMEOUT_S:g} s")

    # ---- control thread, aside ----------------------------------------------------------------------------------

    def read(self, offset: int, wait_s: float) -> DebugBytes:
        """Return the tracer's bytes from ``offset`` on; the reader has all before it."""
        self._heard = time.monotonic()
        with self._changed:
            del self._unread[: max(0, offset - self._unread_at)]
            self._unread_at = max(self._unread_at, offset)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._unread or self.ended, min(wait_s, WAIT_MAX_S))
            data = bytes(self._unread[:PIECE_MAX_BYTES])
            return DebugBytes(self._unread_at, data, "" if data else self.ended)

    def write(self, offset: int, data: bytes) -> None:
        """Hand ``data``, which begins at ``offset`` of all that was written, to the tracer, once."""
        with self._writing:
            fresh = data[max(0, self._written - offset) :]
            self._written = max(self._written, offset + len(data))
            self._ours.sendall(fresh)

    def end(self, reason: str) -> None:
        """Detach: a stopped thread goes on, and the tracing ends."""
        with self._changed:
            self.ended = self.ended or reason
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Wait, after `end`, until the tracer is gone."""
        self._thread.join(timeout_s)

    # ---- main thread --------------------------------------------------------------------------------------------

    def trace_again(self) -> None:
        """Trace the main thread again before a cell: an interrupt at a breakpoint leaves it untraced, as if stopped."""
        tracer = self._pydevd.get_global_debugger()
        if self.ended or tracer is None or sys.gettrace() is not None:
            return
        forget_step(threading.current_thread())
        tracer.enable_tracing()

    # ---- its own thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            start_tracing(self._pydevd, self._theirs)
        except BaseException as error:  # goes to who waits
            self._failure = f"{type(error).__name__}: {error}"
        self._hook, sys.breakpointhook = sys.breakpointhook, self._on_breakpoint
        self._ours_hook = sys.breakpointhook
        self._started.set()
        try:
            self._pump()
        finally:
            self.end("the debugger was detached")
            if sys.breakpointhook == self._ours_hook:
                sys.breakpointhook = self._hook
            stop_tracing(self._pydevd, self._visit)
            self._ours.close()
            self._theirs.close()

    def _pump(self) -> None:
        poll = select.poll()  # select takes no descriptor from 1024 on
        poll.register(self._ours, select.POLLIN)
        while not self.ended:
            if not poll.poll(1000):
                if time.monotonic() - self._heard > LEASE_S:
                    self.end("nobody has asked for it any more")
                continue
            data = self._ours.recv(PIECE_MAX_BYTES)
            if not data:
                return
            with self._changed:
                self._unread += data
                self._changed.notify_all()
                while len(self._unread) > _UNREAD_MAX_BYTES and not self.ended:
                    self._changed.wait(1.0)
                    if time.monotonic() - self._heard > LEASE_S:
                        return

    def _on_breakpoint(self, *args: object, **kwargs: object) -> object:
        """``breakpoint()``: stop in the debugger where one is attached, else as without it."""
        if not self.ended and self._pydevd._is_attached():
            stop_at(self._pydevd, sys._getframe(1))
            return None
        return self._hook(*args, **kwargs)


END_TIMEOUT_S = 3.0
_RUNNING, _SUSPENDED = 1, 2  # pydevd's STATE_RUN, STATE_SUSPEND
_AT_BREAKPOINT = 111  # pydevd's CMD_SET_BREAK

_SETTINGS = {
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no advice on options of Python in a rank's output
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",  # a step goes from one statement of a cell to the next
}
"""The settings that pydevd reads from the environment when it is imported, beside `_context`."""

_watches_forks = threading.Event()


def load_pydevd() -> ModuleType:
    """Import debugpy's tracer. Raises: ImportError."""
    hook = sys.breakpointhook
    settings = {**_SETTINGS, "PYDEVD_IPYTHON_CONTEXT": _context()}
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        importlib.import_module("debugpy.server.api")  # puts its own pydevd in place
        pydevd = importlib.import_module("pydevd")
    finally:
        sys.breakpointhook = hook
        for name in ours:
            del os.environ[name]
    if not _watches_forks.is_set():
        _watches_forks.set()
        at_fork(in_child=lambda: _leave_child(pydevd))
    return pydevd


def _context() -> str:
    """The file and functions that run the statements of a cell, as pydevd wants them; a step ends where they begin."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    file = Path(shell.run_code.__code__.co_filename).name if shell else "interactiveshell.py"
    return f"{file}, run_code, run_ast_nodes"


def _leave_child(pydevd: ModuleType) -> None:
    """A process that the rank has forked (a DataLoader's worker) has no debugger: nobody could let it go on."""
    tracer = pydevd.get_global_debugger()
    if tracer is not None:
        tracer.pydb_disposed = True
        tracer.disable_tracing()
        pydevd.set_global_debugger(None)


def hidden_folders() -> tuple[str, ...]:
    """Folders of code that a person who steps through a cell does not want to see."""
    shell = getattr(sys.modules.get("IPython"), "__file__", None)
    between = (contextlib.__file__, str(Path(asyncio.__file__).parent))
    return (PACKAGE.rstrip("/"), *between, *((str(Path(shell).parent),) if shell else ()))


def start_tracing(pydevd: ModuleType, sock: socket.socket) -> None:
    """Have pydevd speak over ``sock``, in place of a TCP connection that it would make."""
    import debugpy

    tracer = pydevd.PyDB()  # `settrace` uses the one that is there, and connects only one that it makes
    tracer.initialize_network(sock)
    tracer.ready_to_run = True
    hidden = (str(Path(debugpy.__file__).parent), PACKAGE)
    pydevd.PyDevdAPI().set_dont_trace_start_end_patterns(tracer, hidden, ())
    tracer.start_auxiliary_daemon_threads()
    setup = {"client": "127.0.0.1", "server": False, "port": 0, "multiprocess": False, "skip-notify-stdin": True}
    pydevd.settrace(host="127.0.0.1", suspend=False, patch_multiprocessing=False, __setup_holder__=setup)
    tracer.set_tracing_for_untraced_contexts()
    tracer.disable_tracing()  # of this thread


def stop_tracing(pydevd: ModuleType, visit_main: Callable[[Callable[[FrameType | None], object]], None]) -> None:
    """End pydevd, so that a next session may begin, and free the main thread of the tracing at once.

    Other threads that ran meanwhile keep a trace function that does nothing, as long as they live.
    """
    tracer = pydevd.get_global_debugger()
    pydevd.stoptrace()
    deadline = time.monotonic() + END_TIMEOUT_S
    while pydevd.get_global_debugger() is tracer is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # its own threads end it too, and only then may the next one begin
    if pydevd.get_global_debugger() is tracer:
        pydevd.set_global_debugger(None)
    for thread in threading.enumerate():
        forget_step(thread)
    if tracer is not None:
        visit_main(lambda _frame: tracer.disable_tracing())


def forget_step(thread: threading.Thread) -> None:
    """A thread that was stopped, or about to, when the tracing ended, is not when it begins again."""
    info = getattr(thread, "additional_info", None)
    if info is not None:
        info.pydev_state, info.pydev_step_cmd, info.pydev_step_stop = _RUNNING, -1, None


def stop_at(pydevd: ModuleType, frame: FrameType) -> None:
    """Stop the running thread in ``frame``, until the person lets it go on."""
    tracer, thread = pydevd.get_global_debugger(), threading.current_thread()
    info = pydevd.set_additional_thread_info(thread)
    info.is_tracing += 1  # as in a trace function: what runs in here is nobody's to step through
    try:
        tracer.set_suspend(thread, _AT_BREAKPOINT)
        tracer.do_wait_suspend(thread, frame, "line", None)
    finally:
        info.is_tracing -= 1


def is_suspended(thread: threading.Thread) -> bool:
    """Whether the thread stands at a breakpoint, or after a step."""
    info = getattr(thread, "additional_info", None)
    if info is None or getattr(info, "pydev_state", None) != _SUSPENDED:
        return False
    return bool(getattr(info, "is_in_wait_loop", True))  # older ones do not say
