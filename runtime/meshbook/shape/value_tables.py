"""Values of ranks as people read them: a table in text or HTML, and a DataFrame."""

from __future__ import annotations

import html
import importlib.util
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from meshbook.errors import UsageError
from meshbook.formatting import format_sizes, format_some_ranks, group_ranks
from meshbook.shape.extent import Point

_ROWS = 20
_ROW_CHARS = 100
_LABEL_CHARS = 24
_GRID_CELLS = 256
_GRID_CHARS = 24
_CELL = "padding:2px 8px;text-align:left;font-family:monospace;white-space:pre"


def to_text(sizes: Mapping[str, int], texts: Iterable[tuple[int, str]]) -> str:
    """Draw a row for each text, with the ranks that have it; at most a screen. texts: of each rank."""
    rows, others = _rows(texts)
    width = max(len(label) for label, _ in rows)
    lines = [f"ValueMesh: {format_sizes(sizes)}"]
    lines += [f"  {label:<{width}}  {_cut(text, _ROW_CHARS - width)}" for label, text in rows]
    return "\n".join([*lines, *([f"  {_more(others)}"] if others else [])])


def to_html(sizes: Mapping[str, int], texts: Sequence[tuple[int, str]]) -> str:
    """Draw the same in HTML. Values of two axes lie in a grid, with those in bold that differ from most."""
    counts = Counter(text for _, text in texts)
    is_grid = len(sizes) == 2 and len(counts) > 1 and len(texts) <= _GRID_CELLS
    if is_grid and all(len(text) <= _GRID_CHARS for text in counts):
        (down, rows), (across, columns) = sizes.items()
        usual, count = counts.most_common(1)[0]
        heads = [f"{down} \\ {across}", *map(str, range(columns))]
        lines = [_line(heads, "th")]
        for row in range(rows):
            cells = texts[row * columns : (row + 1) * columns]
            odd = [text != usual and count > len(texts) / 2 for _, text in cells]
            lines.append(
                _line(
                    [str(row)],
                    "th",
                    [_td(text, f"rank {rank}", bold) for (rank, text), bold in zip(cells, odd, strict=True)],
                )
            )
        note = ""
    else:
        found, others = _rows(texts)
        equal = f"equal on all {len(texts)}" if len(counts) == 1 and len(texts) > 1 else ""
        lines = [_line([equal or label], "th", [_td(_cut(text, _ROW_CHARS))]) for label, text in found]
        note = f"<div>{html.escape(_more(others))}</div>" if others else ""
    title = f"<div><b>ValueMesh</b> {html.escape(format_sizes(sizes))}</div>"
    return f"<div>{title}<table>{''.join(lines)}</table>{note}</div>"


def frame(ranks: Sequence[int], items: Iterable[tuple[Point, object]]) -> Any:
    """Return the DataFrame of `ValueMesh.frame`. Raises: UsageError where no library has one."""
    rows: list[dict[str, object]] = []
    for rank, (point, value) in zip(ranks, items, strict=True):
        columns = {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {"value": value}
        rows.append({"rank": rank, **point, **columns})
    names = list(dict.fromkeys(name for row in rows for name in row))
    data = {name: [row.get(name) for row in rows] for name in names}
    libraries = ("pandas", "polars")
    imported = [name for name in libraries if name in sys.modules]
    for name in imported or [name for name in libraries if importlib.util.find_spec(name)]:
        return importlib.import_module(name).DataFrame(data)
    raise UsageError("frame() makes a DataFrame of pandas or Polars, but neither is installed: %pip install pandas")


def describe(load: Callable[[Any], object], held: object) -> str:
    """Return the repr of a value on one line, or the reason why there is none."""
    try:
        return re.sub(r"\s*\n\s*", " ", _repr(load(held)))
    except Exception as error:
        return f"<{type(error).__name__}: {error}>"


def _rows(texts: Iterable[tuple[int, str]]) -> tuple[list[tuple[str, str]], int]:
    """Return a row for each text with the label of its ranks, and the number of ranks beyond the last row."""
    groups = group_ranks(texts)
    shown = _ROWS - 1 if len(groups) > _ROWS else _ROWS
    rows = [(f"[{format_some_ranks(ranks, _LABEL_CHARS)}]", text) for text, ranks in islice(groups.items(), shown)]
    return rows, sum(len(ranks) for ranks in islice(groups.values(), shown, None))


def _more(others: int) -> str:
    return f"and {others} more ranks; .values() has all, .get(rank) one"


def _line(heads: Iterable[str], tag: str, cells: Iterable[str] = ()) -> str:
    heading = "".join(f'<{tag} style="{_CELL}">{html.escape(head)}</{tag}>' for head in heads)
    return f"<tr>{heading}{''.join(cells)}</tr>"


def _td(text: str, title: str = "", bold: bool = False) -> str:
    weight = ";font-weight:bold" if bold else ""
    return f'<td style="{_CELL}{weight}" title="{title}">{html.escape(text)}</td>'


class _Reprs(reprlib.Repr):
    """Reprs long enough to tell values apart, short enough for a thousand of them; dicts keep their order."""

    def __init__(self) -> None:
        super().__init__()
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = 100
        self.maxset = self.maxfrozenset = self.maxdeque = 100
        self.maxstring = self.maxother = self.maxlong = 2000

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        if level <= 0 and x:
            return "{...}"
        pairs = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in islice(x.items(), self.maxdict)]
        return "{" + ", ".join(pairs + ["..."] * (len(x) > self.maxdict)) + "}"


_repr = _Reprs().repr


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 3] + "..."
