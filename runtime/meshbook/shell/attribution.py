"""The link from a text that a rank prints, or shows, to the cell that it belongs to.

Where the main thread prints many lines in a row on one stream, they take a shorter way, a *run*:

    print ──> RankStream.write                           whose text it is, marks, unfinished lines by thread
    print ──> TextIOWrapper.write ──> _RunOfLines.write  C code puts a line together, and a short function writes it:
                                                         it is in the same descriptor when print returns, as before

The second way costs half as much. It is taken where nothing can come up that only the first one knows how to do, and
left before that begins: another stream is printed on, a thread starts, text is to be dropped, the process forks,
another call begins. An event loop may have tasks of other cells: no run begins in it, and the first line of another
cell ends one. A line belongs to the cell that ends it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING

from meshbook.concurrency import forks
from meshbook.concurrency.background import is_hidden
from meshbook.concurrency.patches import patch

if TYPE_CHECKING:
    from meshbook.shell.streams import RankStream

BEGIN_AFTER = 32
"""The number of lines in a row after which a run begins."""


class LineRuns:
    """The runs of lines of a process; one stream at a time has one. Any thread may end it."""

    def __init__(self) -> None:
        self.stream: RankStream | None = None
        self._held_off: set[int] = set()
        self._generation = forks.generation

    def begin(self, stream: RankStream) -> None:
        """Begin a run on ``stream``, on which many lines were printed, if no other thread or task can print."""
        is_alone = (
            threading.get_ident() == forks.main_thread
            and forks.generation == self._generation
            and asyncio._get_running_loop() is None
            and all(thread is threading.main_thread() or is_hidden(thread) for thread in threading.enumerate())
        )
        if is_alone and not self._held_off:
            self.stream = stream  # first: an interrupt may come in the midst of it
            stream.begin_run()

    def end(self) -> None:
        """End the run, since something begins that only `RankStream.write` knows how to do."""
        if (stream := self.stream) is not None:
            stream.end_run()
            self.stream = None  # last: after an interrupt the next end writes what is left

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Have no run inside the block, in which the calling thread's text is not the running cell's."""
        self._held_off.add(thread := threading.get_ident())
        try:
            self.end()
            yield
        finally:
            self._held_off.discard(thread)


CELL_OF_CONTEXT: ContextVar[int | None] = ContextVar("meshbook_cell", default=None)
"""The cell that a task comes from, negative within `meshbook.shell.streams.OutputBeside`."""

UNHEARD: ContextVar[bool] = ContextVar("meshbook_unheard", default=False)
"""Whether text is dropped, unless it is the running cell's."""


class Attribution:
    """Knows the running cell, and the cell that the calling thread or task comes from.

    Tasks inherit a context variable; threads are marked when they are started (`mark_threads`), since their context is
    empty. Text of unknown origin, and all text of forked children, counts as the running cell's.
    """

    def __init__(self, late_text: Callable[[str, str, int], None], mark_place: Callable[[], None]) -> None:
        """mark_place: called where the next text must come behind all text that was written before."""
        self.late_text = late_text
        self._mark_place = mark_place
        self.last_stream: object = None
        """The stream on which Python has printed last."""
        self.running: int | None = None
        self.forked = False
        """Whether this process was forked by user code; then the sink is not ours."""
        self.runs = LineRuns()

    @contextlib.contextmanager
    def cell(self, cell_id: int) -> Iterator[None]:
        """Give threads and tasks that the main thread starts inside the block to ``cell_id``."""
        self.runs.end()
        token = CELL_OF_CONTEXT.set(cell_id)
        outer, self.running = self.running, cell_id
        try:
            yield
        finally:
            self.running = outer
            CELL_OF_CONTEXT.reset(token)

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Drop the calling thread's text inside the block, since no person has asked for it."""
        with self.runs.held_off():
            token = UNHEARD.set(True)
            try:
                yield
            finally:
                UNHEARD.reset(token)

    def origin(self) -> int | None:
        """Return the cell that the calling thread or task comes from, None when it comes from no cell."""
        cell = CELL_OF_CONTEXT.get()
        if cell is None:
            cell = getattr(threading.current_thread(), "_meshbook_cell", None)
        return None if cell is None else abs(cell)

    def late_cell(self) -> int | None:
        """Return the cell of the caller's text if that is not the running one."""
        cell = self.origin()
        if self.forked:
            return None
        is_beside = (CELL_OF_CONTEXT.get() or 0) < 0
        return cell if is_beside or cell != self.running else None

    def turn_to(self, stream: object) -> None:
        """Note that Python prints on another stream than before."""
        if self.last_stream is not None and not self.forked:
            self._mark_place()
        self.last_stream = stream

    def mark_threads(self) -> None:
        """Have threads remember the cell that starts them, from now on."""
        start = threading.Thread.start

        @wraps(start)
        def start_marked(thread: threading.Thread) -> None:
            thread._meshbook_cell = self.origin()  # type: ignore[attr-defined]
            if not is_hidden(thread):
                self.runs.end()
            start(thread)

        patch(threading.Thread, "start", start_marked)
