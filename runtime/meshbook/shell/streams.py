"""stdout and stderr of a rank.

    print() in the running cell ──> RankStream ──> fd 1 or 2, a pipe that the host agent reads
    print() by a thread or task that an earlier cell started ──> Sink.late_text, with that cell's id
    C code, subprocesses ──> fd 1 or 2
    marks ──> a duplicate of the pipe that user code does not know: always to the agent

A line is one write, made when the line ends, so that the lines of Python, of C code and of commands come out in their
order. Partial lines wait for their end or for a flush; each thread has its own. Many lines in a row take a shorter way
(`meshbook.shell.attribution`).

User code may lead fd 1 or 2 elsewhere (dup2 of a file). A descriptor that was closed, or leads to where nothing can be
written (a full disk, a pipe without reader), is led back to the agent's pipe, so printing fails only when the agent is
gone. A child may have made the pipe, which it shares, non-blocking: then the writer itself waits while it is full.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import select
import sys
import threading
from collections.abc import Iterable
from select import PIPE_BUF
from threading import get_ident
from typing import TYPE_CHECKING

from meshbook.concurrency.forks import at_fork
from meshbook.curves.recorder import recorder
from meshbook.shell.attribution import BEGIN_AFTER, CELL_OF_CONTEXT, UNHEARD, Attribution, LineRuns
from meshbook.system import descriptors
from meshbook.wire.messages import JOINS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class RankPipe:
    """The pipe behind one descriptor. Any thread may call any method."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, descriptors.FIRST)
        self._file = self._open()

    def write(self, data: bytes) -> None:
        """Write all of the text. The rest of an interrupted write follows with the next one.

        Raises: BrokenPipeError when the agent is gone.
        """
        while True:
            try:
                if data:
                    self._file.write(data)
                    data = b""
                return self._file.flush()
            except BlockingIOError as full:
                data = data[full.characters_written :]
                _await_room(self._fd)
            except OSError:
                if not self.lead_back():
                    raise

    def mark(self, mark: bytes) -> None:
        """Write a mark for the agent behind the text so far, of at most PIPE_BUF bytes, which are never torn.

        Raises: BrokenPipeError when the agent is gone.
        """
        while True:
            try:
                os.write(self._kept, mark)
                return
            except BlockingIOError:
                _await_room(self._kept)

    def reopen(self) -> None:
        """Open the descriptor again if it was closed; else the next file would get its number, and the text."""
        descriptors.fill(self._fd, self._kept)

    def leads_to_agent(self) -> bool:
        """Whether text goes to the agent, and not to where user code has led it."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.fstat(self._kept))
        except OSError:  # it is closed
            return False

    def after_fork(self) -> None:
        """Replace the file in a forked child: its lock may be held for ever, and the parent writes the text in it."""
        self._parents_file = self._file  # kept, since a file writes its buffer when it is collected
        self.reopen()
        self._file = self._open()

    def _open(self) -> io.BufferedWriter:
        return io.BufferedWriter(io.FileIO(self._fd, "wb", closefd=False))

    def lead_back(self) -> bool:
        """Lead the descriptor to the agent again; returns whether it led elsewhere, or nowhere."""
        if descriptors.fill(self._fd, self._kept):
            return True
        if self.leads_to_agent():
            return False
        descriptors.replace(self._fd, self._kept)
        return True


def _await_room(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


BLOCK_LINES, BLOCK_CHARS = 100, 20_000
"""The most lines and characters of one write that are shown as one block: more would hide the lines of other ranks."""
PARTIAL_LINE_MAX = 8192
"""The most characters of an unfinished line that wait."""

_IOLBF = 1
_libc = ctypes.CDLL(None)


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
        """The unfinished lines by thread, or by (late cell, thread)."""
        self._flushing = threading.RLock()  # a signal handler may print in the midst of it
        self.is_flushing = False
        """Whether a thread writes out unfinished lines; set before it takes them, so that others wait for it."""
        self._in_a_row = 0
        self.run: _RunOfLines | None = None
        """The shorter way, once there was need of it; user code may have bound its ``write``."""
        self._pipe = RankPipe(fd)
        self.mark, self.reopen, self.lead_back = self._pipe.mark, self._pipe.reopen, self._pipe.lead_back

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        size = len(text)
        if self.run is not None:
            self._attribution.runs.end()  # called by a name that was bound before it began
            self.run.file.flush()  # a name that was bound in it has begun a line
        cell = CELL_OF_CONTEXT.get()
        is_known = cell is not None and cell == self._attribution.running  # the usual case, kept short
        if not is_known and UNHEARD.get():
            return size
        late = None if is_known else self._attribution.late_cell()
        thread = get_ident()
        key = thread if late is None else (late, thread)
        if -1 < text.find("\n") < len(text) - 1:
            text = self._as_block(text)
        line = self.partial.pop(key, "") + text
        if self.is_flushing:
            with self._flushing:
                pass  # what this thread has begun is being written by another: it comes first
        if "\n" in text or "\r" in text or len(line) > PARTIAL_LINE_MAX:
            if late is None and self._attribution.last_stream is self:  # as `_emit`, without its calls
                self._pipe.write(line.encode("utf-8", "backslashreplace"))
                self._in_a_row += 1
                if self._in_a_row > BEGIN_AFTER and is_known and not self.partial:
                    self._in_a_row = 0
                    self._attribution.runs.begin(self)
            else:
                self._in_a_row = 0
                self._emit(late, line)
        elif line:
            self.partial[key] = line
        return size

    def _as_block(self, text: str) -> str:
        """Mark the lines of one write as belonging together, so that those of other ranks do not come between them."""
        if len(text) > BLOCK_CHARS or "\r" in text or text.count("\n") > BLOCK_LINES or not self._pipe.leads_to_agent():
            return text
        self._in_a_row = 0  # C code would not mark them
        body = text.removesuffix("\n")
        return body.replace("\n", f"{JOINS}\n") + text[len(body) :]

    def flush(self, thread: int = 0) -> None:
        """Write out the lines that threads have begun; only those of ``thread``, if one is given."""
        if self.run is not None:
            self.run.file.flush()
        if not self.partial and not self.is_flushing:
            return  # nothing has been begun, or it is written
        with self._flushing:
            self.is_flushing = True
            try:
                for key in list(self.partial):
                    late, of = key if isinstance(key, tuple) else (None, key)
                    if thread in (0, of) and (line := self.partial.pop(key, "")):
                        self._emit(late, line)
            finally:
                self.is_flushing = False

    def _emit(self, late: int | None, text: str) -> None:
        if late is None:
            self.write_bytes(text.encode("utf-8", "backslashreplace"))
        else:
            self._attribution.late_text(self._stream, text, late)

    def write_bytes(self, data: bytes) -> None:
        """Write all of the data, waiting while the pipe is full. The next write ends an interrupted one."""
        self._attribution.runs.end()
        if self._attribution.last_stream is not self:
            self._attribution.turn_to(self)
        self._pipe.write(data)

    def begin_run(self) -> None:
        """Have ``write`` be the shorter way from now on; called on the main thread."""
        if self.run is None:
            self.run = _RunOfLines(self, self._fd, self._attribution.runs)
        self.run.cell = CELL_OF_CONTEXT.get()
        self.write = self.run.file.write  # type: ignore[method-assign, assignment]

    def end_run(self) -> None:
        """Put our ``write`` back, on any thread; called again when it was interrupted."""
        vars(self).pop("write", None)
        if self.run is not None:
            self.run.cell = CELL_OF_CONTEXT.get()  # the begun line is the run's, whichever thread ends it
            self.run.file.flush()
            self.run.cell = _NO_CELL

    def after_fork(self) -> None:
        """Forget unfinished lines in a forked child, since the parent writes them."""
        vars(self).pop("write", None)
        self._pipe.after_fork()
        self._flushing, self.is_flushing = threading.RLock(), False
        if self.run is not None:
            self.run.cell = _NO_CELL
            self.run.file.flush()
        self.partial.clear()

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: object) -> None:
        """Change nothing: the encoding is UTF-8 and lines are written at once."""

    def close(self) -> None:
        self.flush()


_NO_CELL, _NEWLINE = object(), ord("\n")
_cell_of_context, _write_to = CELL_OF_CONTEXT.get, os.write  # looked up once, since they are called for each line


class _RunOfLines(io.BufferedIOBase):
    """The shorter way of a stream's text: C code puts the lines together, and hands each to `write` at its end."""

    closed = False  # a plain value, since C code asks for it at every text

    def __init__(self, stream: RankStream, fd: int, runs: LineRuns) -> None:
        self.name = stream.name
        self._stream = stream
        self._fd = fd
        self._runs = runs
        self.cell: object = _NO_CELL
        """The cell whose lines go to the descriptor."""
        self.file = io.TextIOWrapper(self, "utf-8", "backslashreplace", "\n", line_buffering=True)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write a line, or at a flush the begun one; what only `RankStream.write` knows how to do ends the run.

        A pipe takes all of so short a text or, when the write is interrupted, nothing. A text with newlines in its
        midst is to be marked.
        """
        size = len(data)
        try:
            if _cell_of_context() is self.cell and size <= PIPE_BUF and (data[-1] == _NEWLINE or b"\n" not in data):
                written = _write_to(self._fd, data)
                if written == size:
                    return size
                data = data[written:]
        except (OSError, IndexError):  # the descriptor was closed, or is full and must not wait; the text is empty
            pass
        self._runs.end()
        self._stream.write(data.decode())
        return size

    def writable(self) -> bool:
        return True


class _ByteStream(io.RawIOBase):
    """The stream ``sys.stdout.buffer``, whose bytes follow the text that was printed before them."""

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
        """Stay open, as the text stream does."""


def install_streams(attribution: Attribution) -> tuple[RankStream, RankStream]:
    """Have this process print to fds 1 and 2, from Python and from C."""
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
    """A block in which the calling thread's or task's text belongs to ``cell_id``, whichever cell runs.

    All of its text is late text, also while a call of the same output runs: so it keeps its order. All of it has been
    written at the end.
    """

    __slots__ = ("_cell_id", "_streams", "_token")

    def __init__(self, streams: Iterable[RankStream], cell_id: int) -> None:
        self._streams, self._cell_id = streams, cell_id

    def __enter__(self) -> None:
        self._token = CELL_OF_CONTEXT.set(-self._cell_id)

    def __exit__(self, *_: object) -> None:
        try:
            for stream in self._streams:
                stream.flush(threading.get_ident())
                stream.reopen()
            if recorder.is_due:
                recorder.flush()
        finally:
            CELL_OF_CONTEXT.reset(self._token)


def flush_streams(streams: Iterable[RankStream]) -> None:
    """Write out the prints of Python and C code, partial lines included. May be called on any thread."""
    for stream in streams:
        if (
            stream.partial or stream.is_flushing or stream.run is not None
        ):  # another thread may write out the partial line
            stream.flush()
    flush_c_streams()


def flush_c_streams() -> None:
    """Write out the prints of C code (``fflush(NULL)``)."""
    _libc.fflush(None)


def _line_buffer_c_stdout() -> None:
    """Have C's stdout write each line at once: on a pipe it would keep 4 kB back, and come out of order."""
    try:
        c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
    except ValueError:
        return  # a C library that names it differently: it comes at the end of the cell
    _libc.setvbuf(c_stdout, None, _IOLBF, ctypes.c_size_t(0))
