"""Cuts what each rank prints into lines, and keeps the one that it has not ended yet.

Lines end with a newline. A carriage return begins the line anew: such a line is a progress bar, whose states replace
each other, and only the last one ever becomes a line. Pure: no clock, no thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

REST_S = 0.5
"""How long a line without its end waits for it."""

LONGEST_TAIL = 8192
"""Characters after which a line without its end is given out as far as it goes."""

_NESTED_BAR = re.compile(r"\n+([^\n]*?)((?:\x1b\[A)+)")
"""tqdm draws the bar of an inner loop one line further down, and goes back up."""


class Line(NamedTuple):
    """A line of one rank, or a part of one."""

    rank: int
    stream: str
    text: str
    """With its newline if the line has ended."""
    continues: bool
    """Its beginning was given out before."""


@dataclass
class _Tail:
    """The line that a rank has not ended yet."""

    text: str = ""
    """What of it was not given out yet."""
    since: float = 0.0
    """When the first character of ``text`` came."""
    begun: bool = False
    bar: bool = False
    below: str = ""
    """The bar of an inner loop, drawn under this one."""


class LineReader:
    """The unfinished lines of all ranks; times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._tails: dict[tuple[int, str], _Tail] = {}

    def feed(self, rank: int, stream: str, text: str, now: float) -> list[Line]:
        """Take what ``rank`` printed, in any cut; returns the lines that it ended."""
        tail = self._tails.setdefault((rank, stream), _Tail())
        if "\x1b[A" in text:
            text = _lift_inner_bar(text, tail)
        *ended, rest = (tail.text + text).split("\n")
        lines = []
        for line in ended:
            continues = tail.begun and "\r" not in line.rstrip("\r")
            lines.append(Line(rank, stream, _last_state(line) + "\n", continues))
            tail.begun = tail.bar = False
        if lines or not tail.text:
            tail.since = now
        tail.bar = tail.bar or "\r" in rest
        tail.text = _compact(rest) if tail.bar else rest
        return lines

    def end(self, rank: int) -> list[Line]:
        """``rank`` prints nothing more to its unfinished lines: returns what there is of them."""
        lines = []
        for stream, tail in self._of(rank):
            del self._tails[rank, stream]
            text = _last_state(tail.text)
            if text.strip() if tail.bar else text:
                lines.append(Line(rank, stream, text, tail.begun and not tail.bar))
            if tail.below.strip():
                lines.append(Line(rank, stream, tail.below, False))
        return lines

    def take_begun(self, rank: int) -> list[Line]:
        """Returns what ``rank`` has begun to print, except for bars; the rest of those lines will follow."""
        return [line for stream, tail in self._of(rank) for line in _give_out(rank, stream, tail)]

    def take_rested(self, now: float) -> list[Line]:
        """Returns the beginnings of lines that have waited for their end long enough."""
        lines: list[Line] = []
        for (rank, stream), tail in self._tails.items():
            if now >= tail.since + REST_S or len(tail.text) > LONGEST_TAIL:
                lines += _give_out(rank, stream, tail)
        return lines

    def due_at(self) -> float | None:
        """When `take_rested` will find something."""
        waiting = (tail.since + REST_S for tail in self._tails.values() if tail.text and not tail.bar)
        return min(waiting, default=None)

    def ranks(self) -> list[int]:
        """The ranks with an unfinished line."""
        return sorted({rank for rank, _ in self._tails})

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        """The progress bars as they stand, equal ones once, each with its ranks."""
        equal: dict[str, list[int]] = {}
        for (rank, _), tail in sorted(self._tails.items()):
            for state in (_last_state(tail.text), tail.below) if tail.bar else ():
                if state.strip():
                    equal.setdefault(state.rstrip(), []).append(rank)
        return [(tuple(ranks), state) for state, ranks in equal.items()]

    def _of(self, rank: int) -> Iterator[tuple[str, _Tail]]:
        yield from [(stream, tail) for (owner, stream), tail in self._tails.items() if owner == rank]


def _give_out(rank: int, stream: str, tail: _Tail) -> list[Line]:
    if tail.bar or not tail.text:
        return []
    line = Line(rank, stream, tail.text, tail.begun)
    tail.text, tail.begun = "", True
    return [line]


def _last_state(line: str) -> str:
    """What a terminal would show of a line with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]


def _compact(line: str) -> str:
    """The part of an unfinished line that still matters: its last state, between its carriage returns."""
    body = line.rstrip("\r")
    return body[max(body.rfind("\r"), 0) :] + ("\r" if len(body) < len(line) else "")


def _lift_inner_bar(text: str, tail: _Tail) -> str:
    """Take inner bars out of ``text`` and keep the last one beside the outer bar."""

    def lift(found: re.Match[str]) -> str:
        tail.below = _last_state(found[1])
        return ""

    return _NESTED_BAR.sub(lift, text)
