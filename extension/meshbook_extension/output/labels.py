"""The text of output: each line behind its ranks, ``[0-3] step 10 loss 2.31``; failures, messages and tables.

A message is a card with a rule in its colour, and no error output: the reader can tell news from trouble. Terminals
have its words on stderr. HTML has its styles in its tags and no script, for viewers of saved notebooks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from meshbook.errors import Failure, FailureKind, RankDeath, UsageError, describe_deaths, group_failures
from meshbook.formatting import WARNING, Table, format_ranks, name_ranks, themed
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


_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(min|[smhd])")
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


NEWS, NOTICE, WARN, FAILURE = "stdout", "notice", "warning", "failure"
"""The kinds of messages; news is text on stdout."""
_RULES = {
    NOTICE: (themed("border-left:3px solid ", "--jp-info-color1", "#0288d1"), "rgba(2,136,209,.07)"),
    WARN: (themed("border-left:3px solid ", *WARNING), "rgba(239,108,0,.09)"),
    FAILURE: (themed("border-left:3px solid ", "--jp-error-color1", "#d32f2f"), "rgba(211,47,47,.08)"),
}
CODE_FONT = themed("font-family:", "--jp-code-font-family", "monospace")
_MESSAGE = (
    "{rule};background:{ground};color:inherit;padding:4px 10px;margin:2px 0 2px 8px;"
    f"white-space:pre-wrap;font-size:13px;{CODE_FONT}"
)


class CellMessage(NamedTuple):
    """A message of ours, and its kind."""

    kind: str
    text: str


def show_message(sink: CellSink, kind: str, text: str) -> None:
    """Show a message as a card, or where the output is text on its stream."""
    if kind == NEWS or not sink.replaces:
        sink.stream("stdout" if kind in (NEWS, FAILURE) else "stderr", f"{text}\n")
        return
    sink.display({"text/plain": text, "text/html": message_card(kind, text)}, {})


def message_card(kind: str, text: str) -> str:
    """Return a message as HTML."""
    rule, ground = _RULES[kind]
    return f'<div style="{_MESSAGE.format(rule=rule, ground=ground)}">{_in_colours(text)}</div>'


_HUES = ("", "#d9534f", "#2e9e4f", "#b08800", "#3b8eea", "#b75fd3", "#1f9aa8", "")
"""The colours of terminals by their numbers, for a light and a dark ground; black and white are those of the text."""
_COLOUR = re.compile(r"\x1b\[([\d;]*)m")


def _in_colours(text: str) -> str:
    """Return a text as HTML, with the colours and the bold letters that a terminal would show."""
    hue, weight, parts = "", "", []
    for number, part in enumerate(_COLOUR.split(text)):
        if number % 2 == 0:
            parts.append(f'<span style="{hue}{weight}">{escape(part)}</span>' if hue or weight else escape(part))
            continue
        codes = [int(code or 0) for code in part.split(";")]
        if codes[0] in (38, 48):  # one of 256 colours: that of the eight which is nearest
            ground, _, shade, *codes = [*codes, 0, 0][: max(3, len(codes))]
            levels = [(shade - 16) // 36, (shade - 16) // 6 % 6, (shade - 16) % 6] if 16 <= shade < 232 else [0, 0, 0]
            nearest = sum((level > max(levels) / 2) << bit for bit, level in enumerate(levels))
            codes = [30 + (nearest if shade > 15 else shade % 8), *codes] if ground == 38 else codes
        for code in codes:
            if code == 0 or 30 <= code <= 39 or 90 <= code <= 97:
                colour = _HUES[code % 10] if code % 10 < 8 and code else ""
                hue = f"color:{colour};" if colour else ""
            if code in (0, 1, 22):
                weight = "font-weight:700" if code == 1 else ""
    return "".join(parts)


def show_tables(sink: CellSink, tables: Sequence[Table], text: str = "") -> None:
    """Show tables below each other, or as text, by default their own."""
    plain = text or "\n".join(map(str, tables))
    if not sink.replaces:
        sink.stream("stdout", f"{plain}\n")
        return
    sys.stdout.flush()  # what was printed stands above
    sink.display({"text/plain": plain, "text/html": "".join(table._repr_html_() for table in tables)}, {})


TOGETHER_S = 0.02
"""The time that a first failure waits for equal ones of other ranks."""
REPEATS_S = 0.15
"""The same for a failure like one that was shown, which the summary of the cell tells as well."""
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

    @property
    def has_news(self) -> bool:
        """Whether a failure waits that is unlike those shown."""
        return any(failure.cause not in self._shown for failure in self._waiting)

    def add(self, failure: Failure, now: float) -> None:
        """Add a failure, to be shown within `TOGETHER_S`, or `REPEATS_S` if an equal one was shown."""
        self._waiting.append(failure)
        due_at = now + (REPEATS_S if failure.cause in self._shown else TOGETHER_S)
        self.due_at = due_at if self.due_at is None else min(self.due_at, due_at)

    def show(self, sink: CellSink, *, brief: bool = False, without_repeats: bool = False) -> None:
        """Show the failures that wait, equal ones once.

        brief: without tracebacks. without_repeats: leave out those like earlier ones.
        """
        waiting = [each for each in self._waiting if not (without_repeats and each.cause in self._shown)]
        groups = group_failures(waiting)
        self._waiting, self.due_at = [], None
        unnamed: list[int] = []
        lines: list[str] = []
        for group in groups:
            first = group[0]
            if first.kind is FailureKind.EXITED:
                continue  # the cell's own end says so
            ranks = [failure.rank for failure in group]
            known = first.cause in self._shown
            if not known:
                self._shown.append(first.cause)
            is_full = not (known or brief or first.kind is FailureKind.INTERRUPTED)
            if is_full and len(self._shown) <= FULL:
                told = [headline(first, ranks)]
                if first.kind is FailureKind.LOST:  # its last lines are on screen
                    told = describe_deaths(RankDeath(each.rank, each.host, each.evalue) for each in group)
                elif not told[0].endswith("".join(first.traceback)):  # else an error of ours, without frames
                    told += first.traceback
                show_message(sink, FAILURE, "\n".join(told))
            elif len(self._shown) <= FULL + BRIEF:
                lines.append(headline(first, ranks, brief=True))
            else:
                unnamed += ranks
        if unnamed:
            lines.append(f"{name_ranks(unnamed)} raised too, each something else")
        if lines:
            show_message(sink, FAILURE, "\n".join(lines))


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
