"""Which cell a text belongs to that a rank prints or shows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps

from meshbook.concurrency.background import is_hidden
from meshbook.concurrency.patches import patch
from meshbook.shell.line_runs import LineRuns

CELL_OF_CONTEXT: ContextVar[int | None] = ContextVar("meshbook_cell", default=None)
"""The cell that a task comes from; negative within `meshbook.shell.streams.OutputBeside`."""

UNHEARD: ContextVar[bool] = ContextVar("meshbook_unheard", default=False)
"""Whether what is printed is dropped, unless it is the running cell's."""


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
        self.runs = LineRuns()

    @contextlib.contextmanager
    def cell(self, cell_id: int) -> Iterator[None]:
        """What the main thread starts inside the block belongs to ``cell_id``."""
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
        """What the calling thread prints inside the block is dropped: nobody has asked for it."""
        with self.runs.held_off():
            token = UNHEARD.set(True)
            try:
                yield
            finally:
                UNHEARD.reset(token)

    def origin(self) -> int | None:
        """The cell that the calling thread or task comes from, None when it comes from no cell."""
        cell = CELL_OF_CONTEXT.get()
        if cell is None:
            cell = getattr(threading.current_thread(), "_meshbook_cell", None)
        return None if cell is None else abs(cell)

    def late_cell(self) -> int | None:
        """The cell of the caller's text if that is not the running one."""
        cell = self.origin()
        if self.forked:
            return None
        is_beside = (CELL_OF_CONTEXT.get() or 0) < 0
        return cell if is_beside or cell != self.running else None

    def turn_to(self, stream: object) -> None:
        """Python prints on another stream than before."""
        self.runs.end()
        if self.last_stream is not None and not self.forked:
            self._mark_place()
        self.last_stream = stream

    def mark_threads(self) -> None:
        """From now on threads remember the cell that starts them."""
        start = threading.Thread.start

        @wraps(start)
        def start_marked(thread: threading.Thread) -> None:
            thread._meshbook_cell = self.origin()  # type: ignore[attr-defined]
            if not is_hidden(thread):
                self.runs.end()
            start(thread)

        patch(threading.Thread, "start", start_marked)
