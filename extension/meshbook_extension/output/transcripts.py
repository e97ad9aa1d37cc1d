"""The output of cells as it was shown, kept so that a person can see it again with `%mesh output`.

A front end that is loaded again has lost the output that came meanwhile: Jupyter sends it to the page that ran the
cell. So the messages of each cell are kept as they go by, up to a limit. They are shown again in another cell, where
the rest of a running cell's output comes as well.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshbook.errors import UsageError
from meshbook.formatting import format_bytes
from meshbook_extension.output.publisher import CellSink, Content

CELL_LIMIT = 1_000_000
"""The most characters that are kept of one cell; the oldest go first."""
CELLS = 50
"""The number of cells whose output is kept."""
LONG_S = 2.0
"""The seconds from which on a cell may have outlived the page that ran it."""


@dataclass
class _KeptMessage:
    """A text of a stream, or a display."""

    stream: str = ""
    text: str = ""
    data: Content = field(default_factory=dict)
    metadata: Content = field(default_factory=dict)
    display_id: str | None = None

    def show(self, sink: CellSink) -> None:
        if self.stream:
            sink.stream(self.stream, self.text)
        else:
            sink.display(self.data, self.metadata, self.display_id)

    @property
    def size(self) -> int:
        return len(self.text) + sum(len(str(value)) for value in self.data.values())


@dataclass(eq=False)
class Transcript:
    """The output of one cell: a sink that keeps its messages and hands them on. From any thread."""

    what: str
    """The cell in words, as ``cell 7``."""
    sink: CellSink
    page: str
    """The front end that ran the cell, by its session's id; empty in a terminal."""
    is_running: Callable[[], bool] = lambda: False
    began: float = field(default_factory=time.monotonic)
    wrote_at: float = field(default_factory=time.monotonic)
    """The time of the last message."""
    lines: int = 0
    is_told: bool = False
    """Whether another page was told of it."""

    def __post_init__(self) -> None:
        self._kept: deque[_KeptMessage] = deque()
        self._displays: dict[str, _KeptMessage] = {}
        self.replaces = self.sink.replaces
        self._bars: Sequence[str] = ()
        self._size = self._dropped = 0
        self._also: list[CellSink] = []
        self._lock = threading.Lock()

    def follow(self, is_running: Callable[[], bool]) -> None:
        """Have ``is_running`` tell whether the cell goes on."""
        self.is_running = is_running

    def stream(self, name: str, text: str) -> None:
        with self._lock:
            self.lines += text.count("\n")
            if self._kept and self._kept[-1].stream == name:
                self._kept[-1].text += text
                self._fit(len(text))
            else:
                self._keep(_KeptMessage(name, text))
            for sink in (self.sink, *self._also):
                sink.stream(name, text)

    def display(self, data: Content, metadata: Content, display_id: str | None = None, update: bool = False) -> None:
        with self._lock:
            shown = self._displays.get(display_id or "")
            if update and shown is not None:
                before = shown.size
                shown.data, shown.metadata = data, metadata
                self._fit(shown.size - before)
            else:
                shown = _KeptMessage(data=data, metadata=metadata, display_id=display_id)
                if display_id:
                    self._displays[display_id] = shown
                self._keep(shown)
            self.sink.display(data, metadata, display_id, update)
            for sink in () if update else self._also:  # an update reaches every display with this id
                sink.display(data, metadata, display_id)

    def bars(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._bars = lines
            for sink in (self.sink, *self._also):
                sink.bars(lines)

    def show(self, sink: CellSink) -> None:
        """Show everything kept in another cell, and all that comes from now on."""
        with self._lock:
            if self._dropped:
                lost = f"the first {format_bytes(self._dropped)} are not kept; all of it is in the logs: %mesh logs"
                sink.stream("stdout", f"{lost}\n")
            for message in self._kept:
                message.show(sink)
            if self._bars:
                sink.bars(self._bars)
            if self.is_running():
                self._also.append(sink)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was shown."""
        return not self._kept and not self._bars

    def _keep(self, message: _KeptMessage) -> None:
        self._kept.append(message)
        self._fit(message.size)

    def _fit(self, more: int) -> None:
        """Drop the oldest messages, or the beginning of the only one, while there are too many characters."""
        self.wrote_at = time.monotonic()
        self._size += more
        while self._size > CELL_LIMIT and len(self._kept) > 1:
            oldest = self._kept.popleft()
            self._displays.pop(oldest.display_id or "", None)
            self._drop(oldest.size)
        only = self._kept[0]
        if self._size > 2 * CELL_LIMIT and only.stream:  # seldom, since it copies
            cut = only.text.find("\n", self._size - CELL_LIMIT) + 1 or self._size - CELL_LIMIT
            only.text = only.text[cut:]
            self._drop(cut)

    def _drop(self, size: int) -> None:
        self._size -= size
        self._dropped += size


class Transcripts:
    """The transcripts of a session by cell, the newest last."""

    def __init__(self) -> None:
        self._of_cell: OrderedDict[str, Transcript] = OrderedDict()
        self._asked_at: dict[str, float] = {}
        """The time of the last request of each page."""

    def open(self, what: str, sink: CellSink, page: str) -> Transcript:
        """Begin the transcript of a cell, in place of an earlier one of the same name."""
        self._of_cell.pop(what, None)
        made = self._of_cell[what] = Transcript(what, sink, page)
        while len(self._of_cell) > CELLS:
            self._of_cell.popitem(last=False)
        return made

    def find(self, word: str = "") -> Transcript:
        """Return the transcript of cell ``word``, as ``7``; without one the newest. Raises: UsageError."""
        if not self._of_cell:
            raise UsageError("no cell has run on a mesh yet. Run one: %%mesh above a cell")
        if not word:
            return next(reversed(self._of_cell.values()))
        if (found := self._of_cell.get(f"cell {word}")) is None:
            known = ", ".join(what.removeprefix("cell ") for what in self._of_cell)
            raise UsageError(f"no output of a cell {word} on a mesh is kept; there are cells {known}")
        return found

    def unseen_by(self, page: str) -> list[Transcript]:
        """Return the cells of other pages that may have written after those pages were gone; each once.

        A page that was loaded again is another one. A cell counts if it ran for long and is the last that its page
        asked for, or still ran then.
        """
        asked_at, self._asked_at[page] = self._asked_at.get(page), time.monotonic()
        if asked_at is not None:
            return []
        found = [
            each
            for each in self._of_cell.values()
            if each.page not in ("", page) and not each.is_told and not each.is_empty
            if each.wrote_at > self._asked_at.get(each.page, 0.0) and each.wrote_at - each.began > LONG_S
        ]
        for each in found:
            each.is_told = True
        return found
