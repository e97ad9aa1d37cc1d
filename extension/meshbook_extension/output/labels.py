"""The text of output: each line behind its ranks, ``[0-3] step 10 loss 2.31``, and failures, equal ones once. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from meshbook.errors import Failure, FailureKind, RankDeath, UsageError, describe_deaths, group_failures
from meshbook.formatting import format_ranks, name_ranks
from meshbook_extension.output.line_merging import LinePiece
from meshbook_extension.output.publisher import CellSink

MANY_RUNS = 40
"""The most changes between stdout and stderr in texts shown together; with more, they are sorted by stream."""
RUNS = 6
"""The same for a cell that has shown many changes."""


class Text(NamedTuple):
    """A text to append to a stream."""

    stream: str
    text: str


def label(ranks: Iterable[int]) -> str:
    """Return the ranks as lines begin: ``[0-3]``."""
    return f"[{format_ranks(ranks)}]"


def label_block(ranks: Iterable[int], block: str) -> str:
    """Write several lines behind one label; the second and later ones are indented by its width."""
    head = f"{label(ranks)} "
    return head + block.replace("\n", "\n" + " " * len(head))


def format_seconds(seconds: float) -> str:
    """Write a time as ``0.34 s``, ``12.3 s``, ``2 min 5 s`` or ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Labeller:
    """A writer of pieces, one after the other, which remembers the line that is not ended."""

    def __init__(self) -> None:
        self._open: LinePiece | None = None

    def write(self, piece: LinePiece) -> list[Text]:
        """Return the text for ``piece``: with a label, or just the rest of the line that is still open."""
        rest = (
            self._open is not None
            and piece.continues
            and (piece.ranks, piece.stream) == (self._open.ranks, self._open.stream)
        )
        written = [] if rest else self.end_line()
        self._open = None if piece.text.endswith("\n") else piece
        if rest:
            text = piece.text
        elif piece.text in ("\n", "\r\n"):
            text = f"{label(piece.ranks)}{piece.text}"
        else:
            body = piece.text.removesuffix("\n")
            text = label_block(piece.ranks, body) + piece.text[len(body) :]
        return [*written, Text(piece.stream, text)]

    def end_line(self) -> list[Text]:
        """Return the newline that is missing before another text can be shown."""
        opened, self._open = self._open, None
        return [Text(opened.stream, "\n")] if opened else []


def join_runs(texts: Sequence[Text], most: int = MANY_RUNS) -> list[Text]:
    """Join neighbours of one stream; if that leaves more than ``most`` texts, join all of each stream."""
    runs: list[tuple[str, list[str]]] = []
    for stream, text in texts:
        if not runs or runs[-1][0] != stream:
            runs.append((stream, []))
        runs[-1][1].append(text)
    if len(runs) > most:
        streams = dict.fromkeys(stream for stream, _ in runs)
        return [Text(name, "".join(text for stream, text in texts if stream == name)) for name in streams]
    return [Text(stream, "".join(parts)) for stream, parts in runs]


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 rank``, ``8 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of ``30m`` or ``1h30m``. Raises: UsageError that shows an example."""
    if not _WHOLE.fullmatch(text):
        unit = f" {text} what? For example" if text.replace(".", "", 1).isdigit() else " Write it as"
        number = text if text.isdigit() else "90"
        raise UsageError(f'{option}: "{text}" is no duration.{unit} {number}s, 30m, 2h or 1h30m.')
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    if not seconds:
        instead = "; to end a mesh: %mesh stop" if option == "--lease" else ""
        raise UsageError(f"{option}: {text} is no time at all{instead}")
    return seconds


def format_duration(seconds: float) -> str:
    """Write a long time as ``45 s``, ``10 min``, ``1 h 58 min`` or ``3 d 2 h``, rounded."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def columns(rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Return a line for each row, all columns of equal width; ``sides`` has ``>`` for columns aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), "<"), widths, strict=True)]
    return ["  ".join(f"{cell:{form}}" for cell, form in zip(row, forms, strict=True)).rstrip() for row in rows]


_CELL = "padding:2px 8px;text-align:{side};white-space:nowrap;max-width:30em;overflow:hidden;text-overflow:ellipsis"


def show_table(sink: CellSink, heads: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "") -> None:
    """Show a table. sides: ``>`` for columns aligned right."""
    data = {"text/plain": "\n".join(columns([heads, *rows], sides)), "text/html": to_html(heads, rows, sides)}
    sys.stdout.flush()  # what was printed stands above
    sink.display(data, {})


def to_html(heads: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Return a table as HTML; long cells end with an ellipsis, and show all of it to a pointer."""
    styles = [_CELL.format(side="right" if side == ">" else "left") for side in sides.ljust(len(heads))]

    def line(cells: Sequence[str], tag: str) -> str:
        shown = zip(cells, styles, strict=True)
        return "".join(f'<{tag} style="{style}" title="{escape(cell)}">{escape(cell)}</{tag}>' for cell, style in shown)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(heads, 'th')}</tr></thead><tbody>{body}</tbody></table>"


TOGETHER_S = 0.02
"""The time that a first failure waits for equal ones of other ranks."""
FULL = 4
"""The most different failures of one cell that are shown with their tracebacks."""
BRIEF = 20
"""The most further failures that get a line."""


class FailureView:
    """The failures of one cell, shown and not yet shown."""

    def __init__(self) -> None:
        self._waiting: list[Failure] = []
        self._shown: list[tuple[str, str, str]] = []
        self.due_at: float | None = None
        """The time at which `show` should be called; None when no failure waits."""

    def add(self, failure: Failure, now: float) -> None:
        """Add a failure, to be shown within `TOGETHER_S`."""
        self._waiting.append(failure)
        self.due_at = self.due_at or now + TOGETHER_S

    def show(self, sink: CellSink, *, brief: bool = False) -> None:
        """Write the failures that wait, equal ones once. brief: without tracebacks."""
        groups = group_failures(self._waiting)
        self._waiting, self.due_at = [], None
        unnamed: list[int] = []
        for group in groups:
            first = group[0]
            if first.ename == "SystemExit" and len(first.traceback) == 1:
                continue  # an early end that was meant: the cell's own end says so
            ranks = [failure.rank for failure in group]
            known = first.cause in self._shown
            if not known:
                self._shown.append(first.cause)
            is_full = not (known or brief or first.kind is FailureKind.INTERRUPTED)
            if is_full and len(self._shown) <= FULL:
                if first.kind is FailureKind.LOST:
                    deaths = [RankDeath(f.rank, f.host, f.evalue) for f in group]  # its last lines are on screen
                    sink.error(first.ename, first.evalue, describe_deaths(deaths))
                else:
                    told = headline(first, ranks)
                    says_all = told.endswith("".join(first.traceback))  # as of an error of ours, without frames
                    sink.error(first.ename, first.evalue, [told] if says_all else [told, *first.traceback])
            elif len(self._shown) <= FULL + BRIEF:
                sink.stream("stderr", f"{headline(first, ranks, brief=True)}\n")
            else:
                unnamed += ranks
        if unnamed:
            sink.stream("stderr", f"{name_ranks(unnamed)} raised too, each something else\n")


def headline(failure: Failure, ranks: Iterable[int], *, brief: bool = False) -> str:
    """Write ``ranks 0-3 raised ValueError: bad shard``, of a longer text the first line; in brief with its place."""
    where = f" ({failure.where})" if failure.where and brief else ""
    if failure.kind is FailureKind.INTERRUPTED:
        return f"{name_ranks(ranks)} stopped at an interrupt{where}"
    if failure.kind is FailureKind.LOST:
        return f"{name_ranks(ranks)} ended: {failure.evalue}"
    if failure.kind is FailureKind.DISAGREES:
        return failure.evalue.replace("\n", ";") if brief else failure.evalue
    value = failure.evalue.splitlines()[0] if failure.evalue else ""
    return f"{name_ranks(ranks)} raised {failure.ename}{': ' if value else ''}{value}{where}"
