"""The reader of ranks' texts, which cuts them into lines and keeps the one that a rank has not ended yet.

Lines end with a newline; those of one write belong together. A carriage return begins the line anew: such a line is a
progress bar, whose states replace each other, and only the last one ever becomes a line. Bars of several ranks that
have the same title and count to the same total (tqdm's text, as it was printed) are shown as one.

Pure: no clock, no thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshbook.calls.output import JOINS, without_joins
from meshbook.formatting import name_ranks

_BAR = re.compile(r"(?:^|(?P<title>[^|]*?):?\s*)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?:(?P<done>\S+?)/(?P<total>\S+))?")
_BAR_WITHIN = 500
"""The most characters before a bar in its line."""
_LEFT = re.compile(r"<\s*(?P<left>[\d:]+)")
_PERCENT = re.compile(r"(?P<percent>\d{1,3})(?:\.\d+)?\s*%")


_ENDED = re.compile(r"(?P<bar>.*\d{1,3}%\|[^|]*\| *\S+/\S+) \[[\d:]+<[\d:?]+, *[^],]+(?P<said>(?:, [^]]*)?)\]\s*")
_BEHIND = 0.05
"""The difference in progress from which on the first and last ranks are named."""


class BarProgress(NamedTuple):
    """The progress of the ranks that show a bar."""

    title: str
    """The title of the bars; empty where they have none, or several."""
    ranks: int
    mean: float
    """The mean of the ranks' fractions, each between 0 and 1."""
    least: float
    slowest: int
    """The rank with the least progress."""
    left: str
    """The longest time left as tqdm writes it, ``01:30``; empty where it is not known."""


def merge_bars(bars: Iterable[tuple[Sequence[int], str]]) -> BarProgress | None:
    """Return one progress for the bars, each given with the ranks that show it; None without a readable bar."""
    read = [(ranks, bar) for ranks, text in bars if ranks and (bar := _read(text)) is not None]
    count = sum(len(ranks) for ranks, _ in read)
    if not count:
        return None
    ranks, slowest = min(read, key=lambda entry: entry[1].fraction)
    titles = {bar.title for _, bar in read}
    return BarProgress(
        title=titles.pop() if len(titles) == 1 else "",
        ranks=count,
        mean=sum(len(ranks) * bar.fraction for ranks, bar in read) / count,
        least=slowest.fraction,
        slowest=min(ranks),
        left=max((bar.left for _, bar in read), key=lambda left: (len(left), left)),
    )


class _Bar(NamedTuple):
    title: str
    fraction: float
    left: str
    total: str


def _read(text: str) -> _Bar | None:
    """Return the bar in ``text``; with a title and a total where it is one of tqdm's."""
    found = _BAR.search(text, 0, _BAR_WITHIN)
    if found is None:
        plain = _PERCENT.search(text)
        return _Bar("", min(1.0, int(plain["percent"]) / 100), "", "") if plain else None
    fraction = int(found["percent"]) / 100
    with contextlib.suppress(TypeError, ValueError, ZeroDivisionError):
        fraction = float(found["done"]) / float(found["total"])  # finer, where the counts are plain numbers
    left = _LEFT.search(text, found.end())
    title, total = (found["title"] or "").strip(), found["total"] or ""
    return _Bar(title, min(1.0, fraction), left["left"] if left else "", total)


def join_bars(bars: Iterable[tuple[Sequence[int], str]]) -> list[tuple[Sequence[int], str]]:
    """Join bars that belong together into one line, in the state of the slowest rank; others stay as they are."""
    joined: list[tuple[Sequence[int], str]] = []
    together: dict[tuple[str, str], list[tuple[float, Sequence[int], str]]] = {}
    for ranks, text in bars:
        bar = _read(text)
        if bar is not None and bar.total:
            together.setdefault((bar.title, bar.total), []).append((bar.fraction, ranks, text))
        else:
            joined.append((ranks, text))
    return joined + [_join(alike) for alike in together.values()]


def _join(alike: Sequence[tuple[float, Sequence[int], str]]) -> tuple[Sequence[int], str]:
    least, last, text = min(alike)
    most, first, _ = max(alike)
    if most - least > _BEHIND:
        text = f"{text}  {name_ranks(last)} last, {name_ranks(first)} at {most:.0%}"
    return sorted(rank for _, ranks, _ in alike for rank in ranks), text


def ended_bar(line: str) -> str:
    """Return the text of an ended bar without its time and rate, in which ranks differ; "" for another line."""
    found = _ENDED.fullmatch(line)
    return f"{found['bar']}\0{found['said']}" if found else ""


REST_S = 0.5
"""The time that an unfinished line waits for its end."""

LONGEST_TAIL = 8192
"""The characters after which an unfinished line is given out as far as it goes."""

_NESTED_BAR = re.compile(r"\n+([^\n]*?)((?:\x1b\[A)+)")
"""The bar of an inner loop, which tqdm draws one line further down before it goes back up."""


_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
"""The codes by which rich hides and shows a terminal's cursor, on a line of their own; a cell has none."""


class Line(NamedTuple):
    """A line of one rank, or a part of one."""

    rank: int
    stream: str
    text: str
    """The text, with its newline if the line has ended; of a block with newlines in it too."""
    continues: bool
    """Whether its beginning was given out before."""


@dataclass
class _Tail:
    """The line that a rank has not ended yet."""

    text: str = ""
    """The part of the line that was not given out yet."""
    since: float = 0.0
    """The time at which the first character of ``text`` came."""
    begun: bool = False
    bar: bool = False
    below: str = ""
    """The bar of an inner loop, drawn under this one."""


def split_lines(text: str) -> tuple[list[str], str]:
    """Return the lines that have ended, without their newlines, and the rest, as it came.

    Lines that were printed by one write are one line, with newlines in it.
    """
    *ended, rest = text.split("\n")
    if JOINS not in text:
        return ended, rest
    lines, begun = [], ""
    for line in ended:
        begun += line
        if line.endswith(JOINS):
            begun += "\n"
        else:
            lines.append(without_joins(begun))
            begun = ""
    return lines, begun + rest


class LineReader:
    """The unfinished lines of all ranks; times are in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._tails: dict[tuple[int, str], _Tail] = {}

    def feed(self, rank: int, stream: str, text: str, now: float) -> list[Line]:
        """Take a text that ``rank`` printed, cut anywhere; returns the lines that it ended."""
        tail = self._tails.setdefault((rank, stream), _Tail())
        if "\x1b[A" in text:
            text = _lift_inner_bar(text, tail)
        ended, rest = split_lines(tail.text + text)
        lines = []
        for line in ended:
            continues = tail.begun and "\r" not in line.rstrip("\r")
            shown = _last_state(line)
            if shown or continues or not line.endswith((_HIDE, _SHOW)):
                is_bar = "\r" in line.rstrip("\r")  # tools draw bars on stderr, but an ended bar is no error
                lines.append(Line(rank, "stdout" if is_bar else stream, shown + "\n", continues))
            tail.begun = tail.bar = False
        if ended or not tail.text:
            tail.since = now
        tail.bar = tail.bar or "\r" in rest
        tail.text = _compact(rest) if tail.bar else rest
        return lines

    def end(self, rank: int) -> list[Line]:
        """Return the unfinished lines of ``rank``, which prints no more to them."""
        lines = []
        for stream, tail in self._of(rank):
            del self._tails[rank, stream]
            text = _last_state(without_joins(tail.text))
            if text.strip() if tail.bar else text:
                lines.append(Line(rank, stream, text, tail.begun and not tail.bar))
            if tail.below.strip():
                lines.append(Line(rank, stream, tail.below, False))
        return lines

    def take_begun(self, rank: int) -> list[Line]:
        """Return the lines that ``rank`` has begun, except for bars; the rest of those lines will follow."""
        return [line for stream, tail in self._of(rank) for line in _give_out(rank, stream, tail)]

    def take_rested(self, now: float) -> list[Line]:
        """Return the beginnings of lines that have waited for their end long enough."""
        lines: list[Line] = []
        for (rank, stream), tail in self._tails.items():
            if now >= tail.since + REST_S or len(tail.text) > LONGEST_TAIL:
                lines += _give_out(rank, stream, tail)
        return lines

    def due_at(self) -> float | None:
        """Return when `take_rested` will find something."""
        waiting = (tail.since + REST_S for tail in self._tails.values() if tail.text and not tail.bar)
        return min(waiting, default=None)

    @property
    def is_empty(self) -> bool:
        """Whether all lines have ended."""
        return not any(tail.text or tail.begun or tail.below for tail in self._tails.values())

    def ranks(self) -> list[int]:
        """Return the ranks with an unfinished line."""
        return sorted({rank for rank, _ in self._tails})

    def bars(self) -> list[tuple[tuple[int, ...], str]]:
        """Return the progress bars as they stand, equal ones once, each with its ranks."""
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
    line = Line(rank, stream, _without_cursor(without_joins(tail.text)), tail.begun)
    tail.text = ""
    tail.begun = tail.begun or bool(line.text)
    return [line] if line.text else []


def _last_state(line: str) -> str:
    """Return the part of a line with carriage returns that a terminal would show."""
    return _without_cursor(line).rstrip("\r").rpartition("\r")[2]


def _without_cursor(text: str) -> str:
    return text.replace(_HIDE, "").replace(_SHOW, "") if "\x1b" in text else text


def _compact(line: str) -> str:
    """Return the last state of an unfinished line, between its carriage returns."""
    body = line.rstrip("\r")
    return body[max(body.rfind("\r"), 0) :] + ("\r" if len(body) < len(line) else "")


def _lift_inner_bar(text: str, tail: _Tail) -> str:
    """Take inner bars out of ``text`` and keep the last one beside the outer bar."""

    def lift(found: re.Match[str]) -> str:
        tail.below = _last_state(found[1])
        return ""

    return _NESTED_BAR.sub(lift, text)
