"""The project's way to write ranks as ranges, sizes and times short, to name near misses, and to draw tables."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TypeAlias, TypeVar

K = TypeVar("K")


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as the output labels do: ``0-3``, ``0,2``, ``0-2,5``; no ranks give an empty text."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(
        str(low) if low == high else f"{low}-{high}" if high > low + 1 else f"{low},{high}" for low, high in runs
    )


def format_some_ranks(ranks: Iterable[int], chars: int) -> str:
    """Write ranks as `format_ranks` does, but cut at a comma to at most ``chars`` characters: ``0,2,4,...``."""
    text = format_ranks(ranks)
    return text if len(text) <= chars else text[: chars - 3].rpartition(",")[0] + ",..."


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2,5``."""
    ranks = sorted(set(ranks))
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"


def format_sizes(sizes: Mapping[str, int]) -> str:
    """``hosts=2, gpus=4``, or ``no axes (one member)``."""
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axes (one member)"


def format_bytes(size_bytes: int) -> str:
    """Three significant digits with a decimal unit: ``950 B``, ``1.21 MB``."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


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


def format_bytes_per_rank(sizes: Collection[int]) -> str:
    """``1.2 MB per rank``; where ranks hold more than others, from and to. sizes: of each rank, in bytes."""
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return f"{least if least == most else f'{least} to {most}'} per rank"


def name_some(names: Sequence[str], count: int) -> str:
    """``a, b and 3 more``: at most so many names, with commas."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def utf8_text(text: str) -> str:
    """``text`` for where only UTF-8 goes: lone surrogates, as of bad file names, get backslashes."""
    return text.encode(errors="backslashreplace").decode()


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean "gpus"?`` with its leading space, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


_SHELL_NAMES = frozenset({"In", "Out", "exit", "get_ipython", "open", "quit"})


def did_you_mean_variable(word: str, names: Iterable[str]) -> str:
    """The same for variables of an IPython shell, without those that it has by itself."""
    return did_you_mean(word, (name for name in names if not name.startswith("_") and name not in _SHELL_NAMES))


def group_ranks(values: Iterable[tuple[int, K]]) -> dict[K, list[int]]:
    """Return each value with the ranks that have it, in the order in which they come."""
    groups: dict[K, list[int]] = {}
    for rank, value in values:
        groups.setdefault(value, []).append(rank)
    return groups


# ---- tables ---------------------------------------------------------------------------------------------------------

RIGHT, WRAPS = ">", "="
LINE = "1px solid rgba(128,128,128,.3)"
"""A line that can be seen on a light and on a dark ground."""
WARNING = "--jp-warn-color1", "#ef6c00"
"""The colour of the odd one among ranks: JupyterLab's, and another one elsewhere."""
TITLE = "font-size:12px;margin:4px 0;color:inherit;white-space:pre-wrap"
_TABLE = "color:inherit;border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;margin:4px 0"
_CELL = f"padding:3px 12px 3px 0;border:none;border-bottom:{LINE};color:inherit;background:none;vertical-align:top"
_CUT = "white-space:pre;max-width:{width}px;overflow:hidden;text-overflow:ellipsis"
_WIDTHS_PX = (480, 480, 480, 300, 300, 200)
"""The most that a column measures in a table of one, two, ... columns; 150 pixels with more of them."""

CellPlace: TypeAlias = tuple[int, int]
"""The row and the column of a cell."""


@dataclass(frozen=True)
class Table:
    """A table, with a line above it and lines below it."""

    heads: Sequence[str]
    """The names of the columns; without any, no line of names is drawn."""
    rows: Sequence[Sequence[str]]
    sides: str = ""
    """A letter for each column: ``<``, ``>``, or ``=`` for text that is wrapped in HTML, and not cut."""
    title: str = ""
    notes: Sequence[str] = ()
    tints: Mapping[CellPlace, float] = field(default_factory=dict)
    """The cells with a ground of their own in HTML, from 0 (none) to 1."""
    odd: frozenset[CellPlace] = frozenset()
    """The cells that differ from the others, which HTML marks."""
    titles: Mapping[CellPlace, str] = field(default_factory=dict)
    """The words that a pointer shows over a cell in HTML; its text by default."""
    bars: Mapping[CellPlace, Sequence[tuple[float, str]]] = field(default_factory=dict)
    """The cells that are bars in HTML: the parts of the whole, each with its ground."""

    def without_empty(self) -> Table:
        """Return the table without the columns that are empty."""
        kept = [at for at in range(len(self.heads)) if any(row[at] for row in self.rows)]
        sides = self.sides.ljust(len(self.heads))
        rows = [[row[at] for at in kept] for row in self.rows]
        return replace(self, heads=[self.heads[at] for at in kept], rows=rows, sides="".join(sides[at] for at in kept))

    def __str__(self) -> str:
        lines = columns([*([self.heads] if any(self.heads) else []), *self.rows], self.sides)
        indented = [f"  {line}" for line in lines] if self.title else lines
        return "\n".join([*filter(None, [self.title]), *indented, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        above = f'<div style="{TITLE}">{escape(self.title.strip())}</div>' if self.title else ""
        below = "".join(f'<div style="{TITLE}">{escape(note)}</div>' for note in self.notes)
        head = f"<thead>{self._line(-1, self.heads, 'th')}</thead>" if any(self.heads) else ""
        body = "".join(self._line(number, row, "td") for number, row in enumerate(self.rows))
        table = f'<table style="{_TABLE}">{head}<tbody>{body}</tbody></table>'
        return f'<div style="overflow-x:auto;padding-left:8px">{above}{table}{below}</div>'

    def _line(self, number: int, cells: Sequence[str], tag: str) -> str:
        shown = (self._cell((number, column), text, tag) for column, text in enumerate(cells))
        return f'<tr style="background:none">{"".join(shown)}</tr>'

    def _cell(self, place: CellPlace, text: str, tag: str) -> str:
        width = _WIDTHS_PX[len(self.rows[0]) - 1] if len(self.rows[0]) <= len(_WIDTHS_PX) else 150
        side = self.sides[place[1] : place[1] + 1]
        style = f"{_CELL};text-align:{'right' if side == RIGHT else 'left'}"
        if side != WRAPS:
            style += f";{_CUT.format(width=width)}"
        if tag == "th":
            style += ";font-weight:600"
        if tint := self.tints.get(place):
            style += f";background:rgba(239,108,0,{tint * 0.55:.2f});padding:3px 12px"
        if place in self.odd:
            style += f";font-weight:700;{themed('box-shadow:inset 3px 0 0 ', *WARNING)};padding-left:8px"
        bars = "".join(
            f'<div style="width:{100 * part:.1f}%;background:{bar}"></div>' for part, bar in self.bars.get(place, ())
        )
        content = f'<div style="display:flex;width:320px;height:11px">{bars}</div>' if bars else escape(text)
        return f'<{tag} style="{style}" title="{escape(self.titles.get(place, text))}">{content}</{tag}>'


def themed(declaration: str, variable: str, otherwise: str) -> str:
    """Return a style with a variable of the theme, behind one for viewers that drop variables."""
    return f"{declaration}{otherwise};{declaration}var({variable},{otherwise})"


def columns(rows: Sequence[Sequence[str]], sides: str = "") -> list[str]:
    """Return a line for each row, all columns of equal width; ``sides`` has ``>`` for columns aligned right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [
        f"{RIGHT if side == RIGHT else '<'}{width}"
        for side, width in zip(sides.ljust(len(widths)), widths, strict=True)
    ]
    return ["  ".join(f"{cell:{form}}" for cell, form in zip(row, forms, strict=True)).rstrip() for row in rows]
