"""The merging of ranks' prints: equal lines of several ranks become one, without losing or reordering any.

A line is shown when every rank that still runs has printed it, or when it has waited for the window. Progress bars that
have ended are equal if they differ in time and rate alone. Pure: no clock, no thread.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from meshbook.calls.output import JOINS
from meshbook_extension.output.alignment import Alignment, Row
from meshbook_extension.output.line_reader import Line, LineReader, ended_bar, split_lines

WINDOW_S = 0.15
"""The time that a line waits for the other ranks."""

_SPECIAL = re.compile(r"[\r\x1b|]")
"""The characters that bars are made of."""


class LinePiece(NamedTuple):
    """A part of the output that some ranks share, ready to be shown."""

    ranks: tuple[int, ...]
    stream: str
    """``stdout``, ``stderr``, or ``display`` for rich output."""
    text: str
    """A line with its newline, or a part of one; or lines that were printed by one write."""
    continues: bool = False
    """Whether the beginning of this line was shown before."""
    display: object = None


class Grouping:
    """A grouping makes one output of those of several ranks; all times are in seconds on the caller's clock.

    Subclasses order and merge the lines.
    """

    joins_bars = False
    """Whether bars that belong together are shown as one."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._running = set(ranks)
        self._reader = LineReader()

    def feed(self, rank: int, stream: str, text: str, now: float, place: int = 0) -> None:
        """Take the text that ``rank`` printed. Between stdout and stderr of one ``place`` the order is not known."""
        self._add_lines(self._reader.feed(rank, stream, text, now), now)

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        """Take a display of ``rank``; displays with equal keys look the same.

        is_result: the value of the cell's last expression; it waits until no rank runs any more.
        """
        raise NotImplementedError

    def end(self, rank: int, now: float) -> None:
        """Note that ``rank`` has ended; an unfinished line of it counts as a line."""
        self._add_lines(self._reader.end(rank), now)
        self._running.discard(rank)

    def take(self, now: float, *, at_once: bool = False) -> list[LinePiece]:
        """Return the pieces to show by now; ``at_once``: all but the pieces that wait for ranks to end."""
        self._add_lines(self._reader.take_rested(now), now)
        return self._take(math.inf if at_once else now, results=False)

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        """Return all pieces that are left, begun lines too; without ``results`` as `take`. More may be fed later."""
        for rank in self._reader.ranks():
            self._add_lines(self._reader.end(rank), now)
        return self._take(math.inf, results=results)

    def due_at(self) -> float | None:
        """Return when `take` will give something, if nothing more is fed; None: never."""
        return self._reader.due_at()

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        """Return the progress bars as they stand, equal ones once, each with its ranks."""
        return self._reader.bars()

    def _add_lines(self, lines: Iterable[Line], now: float) -> None:
        raise NotImplementedError

    def _take(self, now: float, *, results: bool) -> list[LinePiece]:
        raise NotImplementedError


class LineMerger(Grouping):
    """The grouping of ``--group equal``, which merges equal lines (`meshbook_extension.output.alignment`).

    As long as all ranks print the same, line by line, their texts are compared as they are: it takes a tenth of the
    time. Texts that differ, or are more than lines of stdout, are aligned.
    """

    joins_bars = True

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__(ranks)
        self._alignment = Alignment()
        self._place: dict[int, int] = {}
        self._whole: dict[int, deque[tuple[float, str]]] = {}
        """The texts of stdout of each rank, with their times, that are compared as they are."""
        self._ready: list[LinePiece] = []
        self._all = frozenset(self._running)

    def feed(self, rank: int, stream: str, text: str, now: float, place: int = 0) -> None:
        is_plain = stream == "stdout" and self._place.get(rank, 0) == place and not _SPECIAL.search(text)
        is_next = self._whole or (self._alignment.is_empty and self._reader.is_empty)
        if is_plain and is_next and rank in self._running:
            self._whole.setdefault(rank, deque()).append((now, text))
            return
        self._align_whole()
        if self._place.get(rank, 0) != place:
            self._place[rank] = place
            self._alignment.bar(rank)
        self._add_lines(self._reader.feed(rank, stream, text, now), now)

    def end(self, rank: int, now: float) -> None:
        self._end_whole()
        super().end(rank, now)
        if not self._running:  # what waits goes now, so that later lines, of threads, wait for each other only
            self._ready = self._take(math.inf, results=True)
            self._running = set(self._all)

    def take(self, now: float, *, at_once: bool = False) -> list[LinePiece]:
        self._take_equal()
        if at_once or ((due := self._whole_due_at()) is not None and due <= now):
            self._align_whole()
        return super().take(now, at_once=at_once)

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        self._end_whole()
        return super().close(now, results=results)

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        self._align_whole()
        self._add_lines(self._reader.take_begun(rank), now)
        self._alignment.bar(rank)
        self._alignment.add(rank, "display", ("display", key, False), now + WINDOW_S, "", display, is_result)
        self._alignment.bar(rank)

    def due_at(self) -> float | None:
        if self._ready:
            return 0.0
        times = self._reader.due_at(), self._alignment.due_at(self._running), self._whole_due_at()
        return min((time for time in times if time is not None), default=None)

    def _add_lines(self, lines: Iterable[Line], now: float) -> None:
        for rank, stream, text, continues in lines:
            key = (stream, ("|" in text and ended_bar(text)) or text, continues)
            self._alignment.add(rank, stream, key, now + WINDOW_S, text)

    def _take(self, now: float, *, results: bool) -> list[LinePiece]:
        ready, self._ready = self._ready, []
        return ready + [_piece(row) for row in self._alignment.take(now, self._running, results=results)]

    def _take_equal(self) -> None:
        """Move the lines with which the texts of all running ranks begin to ``_ready``."""
        if not self._whole or self._whole.keys() != self._running:
            return
        texts = ["".join([text for _, text in came]) for came in self._whole.values()]
        if not (size := _shared_lines(texts)):
            return
        ranks = tuple(sorted(self._running))
        self._ready += [LinePiece(ranks, "stdout", f"{line}\n") for line in split_lines(texts[0][:size])[0]]
        self._whole = {rank: rest for rank, came in self._whole.items() if (rest := _without(came, size))}

    def _end_whole(self) -> None:
        self._take_equal()
        self._align_whole()

    def _align_whole(self) -> None:
        """Align the texts line by line, as if that had been done when they came."""
        whole, self._whole = self._whole, {}
        for rank, came in whole.items():
            for at, text in came:
                self._add_lines(self._reader.feed(rank, "stdout", text, at), at)

    def _whole_due_at(self) -> float | None:
        return min((came[0][0] + WINDOW_S for came in self._whole.values()), default=None)


def _shared_lines(texts: Sequence[str]) -> int:
    """Count the characters of the whole lines with which all ``texts`` begin."""
    first, last = min(texts), max(texts)  # what these two share, all share
    least, most = 0, min(len(first), len(last))
    while least < most:
        middle = (least + most + 1) // 2
        if first.startswith(last[least:middle], least):
            least = middle
        else:
            most = middle - 1
    end = first.rfind("\n", 0, least)
    while end > 0 and first[end - 1] == JOINS:
        end = first.rfind("\n", 0, end)
    return end + 1


def _without(came: deque[tuple[float, str]], size: int) -> deque[tuple[float, str]]:
    """Return the texts without their first ``size`` characters."""
    while came and size >= len(came[0][1]):
        size -= len(came.popleft()[1])
    if size:
        at, text = came.popleft()
        came.appendleft((at, text[size:]))
    return came


def _piece(row: Row) -> LinePiece:
    ranks = tuple(row.entries)  # in their order
    if row.key[0] == "display":
        return LinePiece(ranks, "display", "", False, row.entries[ranks[0]].display)
    stream, _, continues = row.key
    text = max(entry.text for entry in row.entries.values())  # of bars the one that took longest
    return LinePiece(ranks, stream, text, continues)


class ByRank(Grouping):
    """The grouping that merges nothing: each line goes at once with its rank (``--group none``), or in a block.

    A block (``--group rank``, ``blocks=True``) comes when its rank and the ranks before it have ended. Without blocks,
    results wait until no rank runs any more, and come in the order of ranks.
    """

    def __init__(self, ranks: Iterable[int], *, blocks: bool) -> None:
        super().__init__(ranks)
        self._blocks = blocks
        self._held: dict[int, list[LinePiece]] = {}
        self._ready: list[LinePiece] = []

    def feed_display(self, rank: int, key: Hashable, display: object, now: float, *, is_result: bool = False) -> None:
        self._add_lines(self._reader.take_begun(rank), now)
        if is_result and self._running:
            self._held.setdefault(rank, [])
        self._put(LinePiece((rank,), "display", "", display=display))

    def end(self, rank: int, now: float) -> None:
        super().end(rank, now)
        if self._blocks:
            first = min(self._running, default=math.inf)
            for ended in sorted(rank for rank in self._held if rank < first):
                self._ready += self._held.pop(ended)
        elif not self._running:
            self._ready += self._take_held()

    def close(self, now: float, *, results: bool = True) -> list[LinePiece]:
        return super().close(now, results=results or self._blocks)

    def due_at(self) -> float | None:
        return 0.0 if self._ready else self._reader.due_at()

    def _add_lines(self, lines: Iterable[Line], now: float) -> None:
        for line in lines:
            self._put(LinePiece((line.rank,), line.stream, line.text, line.continues))

    def _put(self, piece: LinePiece) -> None:
        (rank,) = piece.ranks
        if self._blocks and rank in self._running:
            self._held.setdefault(rank, []).append(piece)
        else:
            self._held.get(rank, self._ready).append(piece)

    def _take(self, now: float, *, results: bool) -> list[LinePiece]:
        ready, self._ready = self._ready, []
        return ready + (self._take_held() if results else [])

    def _take_held(self) -> list[LinePiece]:
        held = [piece for _, pieces in sorted(self._held.items()) for piece in pieces]
        self._held.clear()
        return held


def grouping_for(name: str, ranks: Iterable[int]) -> Grouping:
    """Make the grouping that ``--group`` names: ``equal``, ``rank`` or ``none``."""
    if name == "equal":
        return LineMerger(ranks)
    return ByRank(ranks, blocks=name == "rank")
