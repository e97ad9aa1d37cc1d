"""Merging what ranks print: equal lines of several ranks become one, without losing or reordering any.

Open lines stand in one queue, oldest first. A rank's next line joins the first equal one behind the line of the same
stream that it joined last, or else is put at the end; so the lines of each rank and stream keep their order. (Between
stdout and stderr there is none to keep: they come by two pipes.)

    rank 0 printed  a b c        queue  a{0,1}  b{0}  c{0,1}         the next "b" of rank 1 cannot join b{0}:
    rank 1 printed  a c                                 ^ rank 1     it came after c, and is put at the end

The head of the queue is shown when every rank that still runs has it, or when it has waited for the window. Joining is
a dictionary look-up and a bisection among equal open lines. Progress bars that have ended are equal if they differ in
time and rate alone. Pure: no clock, no thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

from meshbook_extension.line_reader import Line, LineReader
from meshbook_extension.progress_bars import ended_bar

WINDOW_S = 0.15
"""How long a line waits for the other ranks."""


class Piece(NamedTuple):
    """A part of the output that some ranks share, ready to be shown."""

    ranks: tuple[int, ...]
    stream: str
    """``stdout``, ``stderr``, or ``display`` for what is not text."""
    text: str
    """One line with its newline, or a part of one."""
    continues: bool = False
    """The beginning of this line was shown before."""
    display: Any = None


class Grouping(Protocol):
    """How the output of several ranks becomes one; all times are in seconds on the caller's clock."""

    def feed(self, rank: int, stream: str, text: str, now: float) -> None:
        """Take what ``rank`` printed."""

    def feed_display(self, rank: int, key: Hashable, display: Any, now: float) -> None:
        """Take something that is not text; equal keys mean that it looks the same."""

    def end(self, rank: int, now: float) -> None:
        """``rank`` has ended; an unfinished line of it counts as a line."""

    def take(self, now: float, *, at_once: bool = False) -> list[Piece]:
        """What is to be shown by now; ``at_once``: all that could be."""

    def close(self, now: float) -> list[Piece]:
        """Everything that is left. More may be fed afterwards."""

    def due_at(self) -> float | None:
        """When `take` will give something, if nothing more is fed; None: never."""

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        """The progress bars as they stand, equal ones once, each with its ranks."""

    joins_bars: bool
    """Whether bars that belong together are shown as one."""


_Key: TypeAlias = "tuple[Any, ...]"
"""(stream, text, continues) of a line, (``display``, its own key) of what is none."""


class _Open:
    """A line in the queue."""

    __slots__ = ("display", "key", "number", "ranks", "since", "text")

    def __init__(self, number: int, key: _Key, since: float, ranks: list[int], text: str, display: Any) -> None:
        self.number, self.key, self.since, self.ranks = number, key, since, ranks
        self.text, self.display = text, display


class Collapser:
    """Merges equal lines (``--group equal``)."""

    joins_bars = True

    def __init__(self, ranks: Iterable[int], *, window_s: float = WINDOW_S) -> None:
        self._running = set(ranks)
        self._window_s = window_s
        self._reader = LineReader()
        self._queue: deque[_Open] = deque()
        self._equal: dict[_Key, list[_Open]] = {}
        """Per key its lines, in order; some at the front may have left the queue."""
        self._last: dict[tuple[int, str], int] = {}
        """Per rank and stream the number of the line that it joined last."""
        self._next_number = 0
        self._shown = -1
        """The number of the last line that left the queue."""

    def feed(self, rank: int, stream: str, text: str, now: float) -> None:
        self._add_lines(self._reader.feed(rank, stream, text, now), now)

    def feed_display(self, rank: int, key: Hashable, display: Any, now: float) -> None:
        self._add_lines(self._reader.take_begun(rank), now)
        self._add(rank, ("display", key), "display", now, display=display)

    def end(self, rank: int, now: float) -> None:
        self._running.discard(rank)
        self._add_lines(self._reader.end(rank), now)

    def take(self, now: float, *, at_once: bool = False) -> list[Piece]:
        self._add_lines(self._reader.take_rested(now), now)
        shown = []
        while self._queue and (at_once or self._is_due(self._queue[0], now)):
            shown.append(self._pop())
        return in_rounds(shown)

    def close(self, now: float) -> list[Piece]:
        for rank in self._reader.ranks():
            self._add_lines(self._reader.end(rank), now)
        return self.take(now, at_once=True)

    def due_at(self) -> float | None:
        rested = self._reader.due_at()
        head = self._queue[0].since + self._window_s if self._queue else None
        return min((time for time in (rested, head) if time is not None), default=None)

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        return self._reader.bars()

    def _add_lines(self, lines: Iterable[Line], now: float) -> None:
        for rank, stream, text, continues in lines:
            self._add(rank, (stream, ("|" in text and ended_bar(text)) or text, continues), stream, now, text)

    def _add(self, rank: int, key: _Key, stream: str, now: float, text: str = "", display: Any = None) -> None:
        line = self._find(rank, key, stream) if key in self._equal else None
        if line is None:
            line = _Open(self._next_number, key, now, [rank], text, display)
            self._next_number += 1
            self._queue.append(line)
            self._equal.setdefault(key, []).append(line)
        else:
            line.ranks.append(rank)
            line.text = max(line.text, text)  # of bars the one that took longest
        self._last[rank, stream] = line.number

    def _find(self, rank: int, key: _Key, stream: str) -> _Open | None:
        """The first open line with this key that ``rank`` may join."""
        equal = self._equal[key]
        after = max(self._last.get((rank, stream), -1), self._shown)
        place = bisect_right(equal, after, key=_number)
        return equal[place] if place < len(equal) else None

    def _is_due(self, line: _Open, now: float) -> bool:
        if now - line.since >= self._window_s:
            return True
        return len(line.ranks) >= len(self._running) and self._running.issubset(line.ranks)

    def _pop(self) -> Piece:
        line = self._queue.popleft()
        self._shown = line.number
        equal = self._equal[line.key]
        if equal[-1] is line:
            del self._equal[line.key]
        elif len(equal) > 32 and equal[len(equal) // 2] is line:
            del equal[: len(equal) // 2 + 1]
        ranks = tuple(sorted(line.ranks))
        if line.key[0] == "display":
            return Piece(ranks, "display", "", False, line.display)
        stream, _, continues = line.key
        return Piece(ranks, stream, line.text, continues)


class ByRank:
    """Merges nothing: each line at once with its rank (``--group none``), or each rank's as one block when it ends
    (``--group rank``, ``blocks=True``)."""

    joins_bars = False

    def __init__(self, ranks: Iterable[int], *, blocks: bool) -> None:
        self._running = set(ranks)
        self._blocks = blocks
        self._reader = LineReader()
        self._held: dict[int, list[Piece]] = {}
        self._ready: list[Piece] = []

    def feed(self, rank: int, stream: str, text: str, now: float) -> None:
        self._add_lines(rank, self._reader.feed(rank, stream, text, now))

    def feed_display(self, rank: int, key: Hashable, display: Any, now: float) -> None:
        self._add_lines(rank, self._reader.take_begun(rank))
        self._place(rank, [Piece((rank,), "display", "", display=display)])

    def end(self, rank: int, now: float) -> None:
        self._add_lines(rank, self._reader.end(rank))
        self._running.discard(rank)
        self._ready += self._held.pop(rank, [])

    def take(self, now: float, *, at_once: bool = False) -> list[Piece]:
        for line in self._reader.take_rested(now):
            self._add_lines(line.rank, [line])
        ready, self._ready = self._ready, []
        return sorted(ready, key=_first_rank) if self._blocks else ready

    def close(self, now: float) -> list[Piece]:
        for rank in self._reader.ranks():
            self._add_lines(rank, self._reader.end(rank))
        held = [piece for _, pieces in sorted(self._held.items()) for piece in pieces]
        self._held.clear()
        return self.take(now) + held

    def due_at(self) -> float | None:
        return 0.0 if self._ready else self._reader.due_at()

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        return self._reader.bars()

    def _add_lines(self, rank: int, lines: Iterable[Line]) -> None:
        self._place(rank, [Piece((rank,), line.stream, line.text, line.continues) for line in lines])

    def _place(self, rank: int, pieces: list[Piece]) -> None:
        if self._blocks and rank in self._running:
            self._held.setdefault(rank, []).extend(pieces)
        else:
            self._ready += pieces


def in_rounds(pieces: list[Piece]) -> list[Piece]:
    """Sort pieces that come out together: each rank's first by rank, then each rank's second, and so on.

    Ranks that do the same then read the same from run to run, whichever was faster. Pieces that share a rank keep their
    order.
    """
    rounds: dict[int, int] = {}
    keys = []
    for piece in pieces:
        number = 1 + max(rounds.get(rank, 0) for rank in piece.ranks)
        rounds.update(dict.fromkeys(piece.ranks, number))
        keys.append((number, piece.ranks[0]))
    return [pieces[index] for index in sorted(range(len(pieces)), key=keys.__getitem__)]


def grouping_for(name: str, ranks: Iterable[int]) -> Grouping:
    """The grouping that ``--group`` names: ``equal``, ``rank`` or ``none``."""
    if name == "equal":
        return Collapser(ranks)
    return ByRank(ranks, blocks=name == "rank")


def _first_rank(piece: Piece) -> int:
    return piece.ranks[0]


def _number(line: _Open) -> int:
    return line.number
