"""A rank under a debugger: debugpy's tracer in this process, its bytes read and written by queries.

debugpy would listen at a TCP port that anyone on the host may use, or start an adapter with a token among its
arguments. Its tracer (pydevd) speaks the Debug Adapter Protocol itself, though, over any socket: it gets one end of a
socketpair that this module owns, and no port exists. The controller carries the bytes over its own links:

    debugger <-> controller  --debug_write-->  control thread, aside --> socketpair --> pydevd's own threads
                             <--debug_read---  (held until there is something, `WAIT_MAX_S` at most)

One piece is under way in each direction, of `PIECE_MAX_BYTES` at most, so nothing waits long behind a debugger. Pieces
are numbered by their offset: one that is asked for, or sent, again does no harm. A session of which nobody reads any
more ends after `LEASE_S`: a rank that is stopped goes on then.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, TypeAlias

from meshbook.concurrency.background import hidden_thread
from meshbook.debug.pydevd import forget_step, is_suspended, load_pydevd, start_tracing, stop_at, stop_tracing
from meshbook.system.descriptors import above_standard

PIECE_MAX_BYTES = 1 << 16
WAIT_MAX_S = 1.0
LEASE_S = 60.0
START_TIMEOUT_S = 15.0
_UNREAD_MAX_BYTES = 1 << 20

Visit: TypeAlias = Callable[[Callable[[FrameType | None], object]], None]
"""Has the main thread call a function with its frame when it looks at its signals next."""


class DebuggerStart(NamedTuple):
    """What became of the wish for a debugger."""

    problem: str = ""
    """Why the rank has no debugger now."""
    python: str = ""
    """The interpreter that lacks debugpy."""
    hidden: tuple[str, ...] = ()
    """Folders of code that a person who steps through a cell does not want to see."""


class DebugBytes(NamedTuple):
    """A piece of what the tracer has said."""

    at: int
    data: bytes
    ended: str
    """Why the session is over, once all was read."""


class DebugSession:
    """One debug session of this process."""

    def __init__(self, id: str, visit: Visit) -> None:
        """Start to trace. Raises: ImportError without debugpy; RuntimeError, OSError when it does not start."""
        self.id = id
        self.ended = ""
        """Why it has ended; empty while it lives."""
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
        """What the tracer has said from ``offset`` on; the reader has all before it."""
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
        try:
            self._ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def join(self, timeout_s: float) -> None:
        """After `end`: wait until the tracer is gone."""
        self._thread.join(timeout_s)

    # ---- main thread --------------------------------------------------------------------------------------------

    def trace_again(self) -> None:
        """Before a cell: an interrupt at a breakpoint has left the main thread untraced, and seemingly stopped."""
        tracer = self._pydevd.get_global_debugger()
        if self.ended or tracer is None or sys.gettrace() is not None:
            return
        forget_step(threading.current_thread())
        tracer.enable_tracing()

    @property
    def is_stopped(self) -> bool:
        """Whether the main thread stands at a breakpoint or after a step."""
        return not self.ended and is_suspended(threading.main_thread())

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
