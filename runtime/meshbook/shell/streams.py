"""stdout and stderr of a rank, and which cell a text belongs to.

    print() in the running cell ──> RankStream ──> fd 1 or 2, a pipe that the host agent reads
    print() by a thread or task that an earlier cell started ──> Sink.late_text, with that cell's id
    C code, subprocesses ──> fd 1 or 2

A line is one write, made when the line ends, so that the lines of Python, of C code and of commands come out in their
order. Partial lines wait for their end or for a flush; each thread has its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING

from meshbook.concurrency.forks import at_fork
from meshbook.concurrency.patches import patch
from meshbook.shell.pipes import RankPipe

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PARTIAL_LINE_MAX = 8192
"""Characters of an unfinished line that may wait."""

_IOLBF = 1
_libc = ctypes.CDLL(None)

_cell_of_context: ContextVar[int | None] = ContextVar("meshbook_cell", default=None)
_unheard: ContextVar[bool] = ContextVar("meshbook_unheard", default=False)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What the calling thread prints inside the block is dropped: nobody has asked for it."""
    token = _unheard.set(True)
    try:
        yield
    finally:
        _unheard.reset(token)


class Attribution:
    """Knows the running cell, and the cell that the calling thread or task comes from.

    Tasks inherit a context variable; threads are marked when they are started (`mark_threads`), since their context is
    empty. Text of unknown origin, and all text of forked children, counts as the running cell's.
    """

    def __init__(self, late_text: Callable[[str, str, int], None], mark_place: Callable[[], None]) -> None:
        """mark_place: called where what is written from now on must come behind what was written."""
        self.late_text = late_text
        self._mark_place = mark_place
        self.last_stream: object = None
        """On which Python has printed last."""
        self.running: int | None = None
        self.forked = False
        """Whether this process was forked by user code: then the sink is not ours."""

    @contextlib.contextmanager
    def cell(self, cell_id: int) -> Iterator[None]:
        """What the main thread starts inside the block belongs to ``cell_id``."""
        token = _cell_of_context.set(cell_id)
        outer, self.running = self.running, cell_id
        try:
            yield
        finally:
            self.running = outer
            _cell_of_context.reset(token)

    def origin(self) -> int | None:
        """The cell that the calling thread or task comes from, None when it comes from no cell."""
        cell = _cell_of_context.get()
        if cell is None:
            cell = getattr(threading.current_thread(), "_meshbook_cell", None)
        return None if cell is None else abs(cell)

    def late_cell(self) -> int | None:
        """The cell of the caller's text if that is not the running one."""
        cell = self.origin()
        if self.forked:
            return None
        is_beside = (_cell_of_context.get() or 0) < 0
        return cell if is_beside or cell != self.running else None

    def turn_to(self, stream: object) -> None:
        """Python prints on another stream than before."""
        if self.last_stream is not None and not self.forked:
            self._mark_place()
        self.last_stream = stream

    def mark_threads(self) -> None:
        """From now on threads remember the cell that starts them."""
        start = threading.Thread.start

        @wraps(start)
        def start_marked(thread: threading.Thread) -> None:
            thread._meshbook_cell = self.origin()  # type: ignore[attr-defined]
            start(thread)

        patch(threading.Thread, "start", start_marked)


class RankStream(io.TextIOBase):
    """A text stream onto ``fd``, in UTF-8; never a terminal, never closed. May be used by any thread."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    mode = "w"

    def __init__(self, name: str, fd: int, attribution: Attribution) -> None:
        self.name = f"<{name}>"
        self.buffer = _ByteStream(self, fd)
        self._stream = name
        self._fd = fd
        self._attribution = attribution
        self.partial: dict[tuple[int, int] | int, str] = {}
        """Unfinished lines by thread, or (late cell, thread)."""
        self._flushing = threading.RLock()  # a signal handler may print in the midst of it
        self._is_flushing = False
        """Set before a line is taken from ``partial``, so whoever finds its own taken sees who writes it."""
        self._pipe = RankPipe(fd)
        self.mark, self.reopen = self._pipe.mark, self._pipe.reopen

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        cell = _cell_of_context.get()
        is_known = cell is not None and cell == self._attribution.running  # the usual case, kept short
        if not is_known and _unheard.get():
            return len(text)
        late = None if is_known else self._attribution.late_cell()
        thread = get_ident()
        key = thread if late is None else (late, thread)
        line = self.partial.pop(key, "") + text
        if self._is_flushing:
            with self._flushing:
                pass  # what this thread has begun is being written by another: it comes first
        if "\n" in text or "\r" in text or len(line) > PARTIAL_LINE_MAX:
            if late is None and self._attribution.last_stream is self:  # as `_emit`, without its calls
                self._pipe.write(line.encode("utf-8", "backslashreplace"))
            else:
                self._emit(late, line)
        elif line:
            self.partial[key] = line
        return len(text)

    def flush(self, thread: int = 0) -> None:
        """Write out what threads have begun; only what ``thread`` has, if one is given."""
        if thread and not self.partial and not self._is_flushing:
            return  # it has begun nothing, or that is written
        with self._flushing:
            self._is_flushing = True
            try:
                for key in list(self.partial):
                    late, of = key if isinstance(key, tuple) else (None, key)
                    if thread in (0, of) and (line := self.partial.pop(key, "")):
                        self._emit(late, line)
            finally:
                self._is_flushing = False

    def _emit(self, late: int | None, text: str) -> None:
        if late is None:
            self.write_bytes(text.encode("utf-8", "backslashreplace"))
        else:
            self._attribution.late_text(self._stream, text, late)

    def write_bytes(self, data: bytes) -> None:
        """Write all of it; waits while the pipe is full. What an interrupt leaves over follows with the next write."""
        if self._attribution.last_stream is not self:
            self._attribution.turn_to(self)
        self._pipe.write(data)

    def after_fork(self) -> None:
        """In a forked child: what waits is the parent's to write."""
        self._pipe.after_fork()
        self.partial.clear()
        self._flushing, self._is_flushing = threading.RLock(), False

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: object) -> None:
        """Nothing to change: the encoding is UTF-8 and lines are written at once."""

    def close(self) -> None:
        self.flush()


class _ByteStream(io.RawIOBase):
    """``sys.stdout.buffer``: bytes follow the text that was printed before them."""

    def __init__(self, text: RankStream, fd: int) -> None:
        self._text = text
        self._fd = fd

    def write(self, data: ReadableBuffer) -> int:
        self._text.flush()
        data = bytes(data)
        self._text.write_bytes(data)
        return len(data)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Stays open, as the stream that it belongs to."""


def install_streams(attribution: Attribution) -> tuple[RankStream, RankStream]:
    """Make fds 1 and 2 what this process prints to, from Python and from C."""
    streams = RankStream("stdout", 1, attribution), RankStream("stderr", 2, attribution)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc, assignment]

    def after_fork() -> None:
        attribution.forked = True
        for stream in streams:
            stream.after_fork()

    at_fork(in_child=after_fork)
    _line_buffer_c_stdout()
    return streams


class OutputBeside:
    """What the calling thread or task starts inside the block belongs to ``cell_id``, whatever cell runs.

    All of its text is late text, also while a call of the same output runs: so it keeps its order. All of it has been
    written at the end.
    """

    __slots__ = ("_cell_id", "_streams", "_token")

    def __init__(self, streams: Iterable[RankStream], cell_id: int) -> None:
        self._streams, self._cell_id = streams, cell_id

    def __enter__(self) -> None:
        self._token = _cell_of_context.set(-self._cell_id)

    def __exit__(self, *_: object) -> None:
        try:
            for stream in self._streams:
                stream.flush(threading.get_ident())
                stream.reopen()
        finally:
            _cell_of_context.reset(self._token)


def flush_c_streams() -> None:
    """Write out what C code has printed (``fflush(NULL)``)."""
    _libc.fflush(None)


def _line_buffer_c_stdout() -> None:
    """C's stdout would keep 4 kB back on a pipe, and so come out of order."""
    try:
        c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
    except ValueError:
        return  # a C library that names it differently: it comes at the end of the cell
    _libc.setvbuf(c_stdout, None, _IOLBF, ctypes.c_size_t(0))
