"""Merging what ranks print: equal lines of several ranks become one, without losing or reordering any.

A line is shown when every rank that still runs has printed it, or when it has waited for the window. Progress bars that
have ended are equal if they differ in time and rate alone. Pure: no clock, no thread.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

from meshbook_extension.output.alignment import Alignment, Row
from meshbook_extension.output.line_reader import Line, LineReader, ended_bar

WINDOW_S = 0.15
"""How long a line waits for the other ranks."""


class LinePiece(NamedTuple):
    """A part of the output that some ranks share, ready to be shown."""

    ranks: tuple[int, ...]
    stream: str
    """``stdout``, ``stderr``, or ``display`` for what is not text."""
    text: str
    """One line with its newline, or a part of one."""
    continues: bool = False
    """The beginning of this line was shown before."""
    display: object = None


class Grouping(Protocol):
    """How the output of several ranks becomes one; all times are in seconds on the caller's clock."""

    def feed(self, rank: int, stream: str, text: str, now: float, place: int = 0) -> None:
        """Take what ``rank`` printed. Between stdout and stderr of one ``place`` nobody knows the order."""

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        """Take something that is not text; equal keys mean that it looks the same.

        is_result: the value of the cell's last expression; it waits until no rank runs any more.
        """

    def end(self, rank: int, now: float) -> None:
        """``rank`` has ended; an unfinished line of it counts as a line."""

    def take(self, now: float, *, at_once: bool = False) -> list[LinePiece]:
        """What is to be shown by now; ``at_once``: all that could be, except for what waits for ranks to end."""

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        """Everything that is left, begun lines too; without ``results`` as `take`. More may be fed afterwards."""

    def due_at(self) -> float | None:
        """When `take` will give something, if nothing more is fed; None: never."""

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        """The progress bars as they stand, equal ones once, each with its ranks."""

    joins_bars: bool
    """Whether bars that belong together are shown as one."""


class LineMerger:
    """Merges equal lines (``--group equal``), as `meshbook_extension.output.alignment` lays them side by side."""

    joins_bars = True

    def __init__(self, ranks: Iterable[int], *, window_s: float = WINDOW_S) -> None:
        self._running = set(ranks)
        self._window_s = window_s
        self._reader = LineReader()
        self._alignment = Alignment()
        self._place: dict[int, int] = {}

    def feed(self, rank: int, stream: str, text: str, now: float, place: int = 0) -> None:
        if self._place.get(rank, 0) != place:
            self._place[rank] = place
            self._alignment.bar(rank)
        self._add_lines(self._reader.feed(rank, stream, text, now), now)

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        self._add_lines(self._reader.take_begun(rank), now)
        self._alignment.bar(rank)
        self._alignment.add(rank, "display", ("display", key, False), now + self._window_s, "", display, is_result)
        self._alignment.bar(rank)

    def end(self, rank: int, now: float) -> None:
        self._running.discard(rank)
        self._add_lines(self._reader.end(rank), now)

    def take(self, now: float, *, at_once: bool = False) -> list[LinePiece]:
        self._add_lines(self._reader.take_rested(now), now)
        return [_piece(row) for row in self._alignment.take(math.inf if at_once else now, self._running)]

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        for rank in self._reader.ranks():
            self._add_lines(self._reader.end(rank), now)
        return [_piece(row) for row in self._alignment.take(math.inf, self._running, results=results)]

    def due_at(self) -> float | None:
        times = self._reader.due_at(), self._alignment.due_at(self._running)
        return min((time for time in times if time is not None), default=None)

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        return self._reader.bars()

    def _add_lines(self, lines: Iterable[Line], now: float) -> None:
        for rank, stream, text, continues in lines:
            key = (stream, ("|" in text and ended_bar(text)) or text, continues)
            self._alignment.add(rank, stream, key, now + self._window_s, text)


def _piece(row: Row) -> LinePiece:
    ranks = tuple(row.entries)  # in their order
    if row.key[0] == "display":
        return LinePiece(ranks, "display", "", False, row.entries[ranks[0]].display)
    stream, _, continues = row.key
    text = max(entry.text for entry in row.entries.values())  # of bars the one that took longest
    return LinePiece(ranks, stream, text, continues)


class ByRank:
    """Merges nothing: each line at once with its rank (``--group none``), or each rank's as one block (``--group
    rank``, ``blocks=True``), which comes when it and the ranks before it have ended.

    Without blocks, results wait until no rank runs any more, and come in the order of ranks.
    """

    joins_bars = False

    def __init__(self, ranks: Iterable[int], *, blocks: bool) -> None:
        self._running = set(ranks)
        self._blocks = blocks
        self._reader = LineReader()
        self._held: dict[int, list[LinePiece]] = {}
        self._ready: list[LinePiece] = []

    def feed(self, rank: int, stream: str, text: str, now: float, place: int = 0) -> None:
        self._add_lines(rank, self._reader.feed(rank, stream, text, now))

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        self._add_lines(rank, self._reader.take_begun(rank))
        if is_result and self._running:
            self._held.setdefault(rank, [])
        self._put(rank, [LinePiece((rank,), "display", "", display=display)])

    def end(self, rank: int, now: float) -> None:
        self._add_lines(rank, self._reader.end(rank))
        self._running.discard(rank)
        if self._blocks:
            first = min(self._running, default=math.inf)
            for ended in sorted(rank for rank in self._held if rank < first):
                self._ready += self._held.pop(ended)
        elif not self._running:
            self._ready += self._take_held()

    def take(self, now: float, *, at_once: bool = False) -> list[LinePiece]:
        for line in self._reader.take_rested(now):
            self._add_lines(line.rank, [line])
        ready, self._ready = self._ready, []
        return ready

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        for rank in self._reader.ranks():
            self._add_lines(rank, self._reader.end(rank))
        return self.take(now) + (self._take_held() if results or self._blocks else [])

    def due_at(self) -> float | None:
        return 0.0 if self._ready else self._reader.due_at()

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        return self._reader.bars()

    def _add_lines(self, rank: int, lines: Iterable[Line]) -> None:
        self._put(rank, [LinePiece((rank,), line.stream, line.text, line.continues) for line in lines])

    def _put(self, rank: int, pieces: list[LinePiece]) -> None:
        if self._blocks and rank in self._running:
            self._held.setdefault(rank, []).extend(pieces)
        elif rank in self._held:
            self._held[rank] += pieces
        else:
            self._ready += pieces

    def _take_held(self) -> list[LinePiece]:
        held = [piece for _, pieces in sorted(self._held.items()) for piece in pieces]
        self._held.clear()
        return held


def grouping_for(name: str, ranks: Iterable[int]) -> Grouping:
    """The grouping that ``--group`` names: ``equal``, ``rank`` or ``none``."""
    if name == "equal":
        return LineMerger(ranks)
    return ByRank(ranks, blocks=name == "rank")
