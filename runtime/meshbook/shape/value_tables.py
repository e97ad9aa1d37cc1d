"""Values of ranks as people read them: tables and columns."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from meshbook.errors import UsageError
from meshbook.formatting import Table, format_sizes, format_some_ranks, group_ranks
from meshbook.shape.extent import Point
from meshbook.shape.large_values import describe_large

_ROWS = 20
_ROW_CHARS = 100
_LABEL_CHARS = 24
_GRID_CELLS = 256
_GRID_CHARS = 24
_NUMBER = re.compile(r"(?:[\w.]+\()?([-+\d.e]+|nan|-?inf)(?:, .*)?\)?")


def to_table(sizes: Mapping[str, int], texts: Sequence[tuple[int, str]], *, is_grid: bool = False) -> Table:
    """Return a row for each text, with the ranks that have it; at most a screen. texts: of each rank.

    is_grid: whether values of two axes that are short and differ lie in a grid, by their coordinates.
    """
    title = f"ValueMesh: {format_sizes(sizes)}"
    counts = Counter(text for _, text in texts)
    is_small = len(texts) <= _GRID_CELLS and all(len(text) <= _GRID_CHARS for text in counts)
    if is_grid and is_small and len(sizes) == 2 and len(counts) > 1:
        return _grid(sizes, texts, counts, title)
    rows, others = _rows(texts)
    if is_grid and len(counts) == 1 and len(texts) > 1:
        rows = [(f"equal on all {len(texts)}", text) for _, text in rows]
    width = max(len(label) for label, _ in rows)
    rows = [(label, text if is_grid else _cut(text, _ROW_CHARS - width)) for label, text in rows]
    more = [f"  and {others} more ranks; .values() has all, .get(rank) one"] if others else []
    return Table(("", ""), rows, title=title, notes=more)


def _grid(sizes: Mapping[str, int], texts: Sequence[tuple[int, str]], counts: Counter[str], title: str) -> Table:
    """Return the table with an axis down and one across: numbers are tinted by their size, odd values marked."""
    (down, rows), (across, width) = sizes.items()
    places = [(number // width, number % width + 1) for number in range(rows * width)]
    numbers = {place: _number(text) for place, (_, text) in zip(places, texts, strict=True)}
    known = [value for value in numbers.values() if value is not None and math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    usual, count = counts.most_common(1)[0]
    odd = {place for place, value in numbers.items() if value is not None and not math.isfinite(value)}
    if count > len(texts) / 2:
        odd |= {place for place, (_, text) in zip(places, texts, strict=True) if text != usual}
    return Table(
        [f"{down} \\ {across}", *map(str, range(width))],
        [[str(row), *(text for _, text in texts[row * width : (row + 1) * width])] for row in range(rows)],
        "<" + ">" * width,
        title,
        tints={
            place: (value - low) / (high - low)
            for place, value in numbers.items()
            if value is not None and math.isfinite(value) and high > low
        },
        odd=frozenset(odd),
        titles={place: f"rank {rank}: {text}" for place, (rank, text) in zip(places, texts, strict=True)},
    )


def _number(text: str) -> float | None:
    """Return the number that a repr shows, as of ``0.5`` and ``tensor(0.5)``; None where it shows none."""
    found = _NUMBER.fullmatch(text)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None


def to_rows(ranks: Sequence[int], items: Iterable[tuple[Point, object]]) -> dict[str, list[object]]:
    """Return the columns of `ValueMesh.frame`: rank, coordinates, and the value or the keys of a dict."""
    rows: list[dict[str, object]] = []
    for rank, (point, value) in zip(ranks, items, strict=True):
        columns = {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {"value": value}
        rows.append({"rank": rank, **point, **columns})
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def to_frame(data: Mapping[str, Sequence[object]]) -> Any:
    """Return a DataFrame of pandas or Polars: of the one that is imported, else of the one that is installed.

    Raises: UsageError where neither is installed.
    """
    libraries = ("pandas", "polars")
    imported = [name for name in libraries if name in sys.modules]
    for name in imported or [name for name in libraries if importlib.util.find_spec(name)]:
        return importlib.import_module(name).DataFrame(data)
    raise UsageError("frame() makes a DataFrame of pandas or Polars, but neither is installed: %pip install pandas")


def describe(load: Callable[[Any], object], held: object) -> str:
    """Return the repr of a value on one line, of a large one its description, or the reason why there is none."""
    try:
        value = load(held)
        return re.sub(r"\s*\n\s*", " ", describe_large(value) or _repr(value))
    except Exception as error:
        return f"<{type(error).__name__}: {error}>"


def _rows(texts: Iterable[tuple[int, str]]) -> tuple[list[tuple[str, str]], int]:
    """Return a row for each text with the label of its ranks, and the number of ranks beyond the last row."""
    groups = group_ranks(texts)
    shown = _ROWS - 1 if len(groups) > _ROWS else _ROWS
    rows = [(f"[{format_some_ranks(ranks, _LABEL_CHARS)}]", text) for text, ranks in islice(groups.items(), shown)]
    return rows, sum(len(ranks) for ranks in islice(groups.values(), shown, None))


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
