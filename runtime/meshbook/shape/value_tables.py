"""Values of ranks as people read them: tables and columns, and large ones in a line.

A large tensor, array or data frame is told by its shape, the range of its numbers, and a fingerprint of its bits: ranks
with equal lines hold equal bits. A tensor on a GPU is copied once, so that its device is waited for once.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import reprlib
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from meshbook.errors import UsageError
from meshbook.formatting import Table, format_sizes, format_some_ranks, group_ranks
from meshbook.shape.extent import Point

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
    groups = group_ranks(texts)
    shown = _ROWS - 1 if len(groups) > _ROWS else _ROWS
    rows = [(f"[{format_some_ranks(ranks, _LABEL_CHARS)}]", text) for text, ranks in islice(groups.items(), shown)]
    others = sum(len(ranks) for ranks in islice(groups.values(), shown, None))
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


# ---- large values ---------------------------------------------------------------------------------------------------

LARGE = 1000
"""The number of elements up to which torch and NumPy print all of them, unless a person has chosen another one."""
LARGE_ROWS = 60
"""The number of rows up to which pandas prints all of them."""
COLUMNS = 30
LOOKED_AT = 1 << 26
"""The most elements that are looked at: a quarter of a gigabyte of float32."""
_NUMBERS = "biufc"
"""The kinds of dtypes that hold numbers."""


def describe_large(value: object) -> str | None:
    """Describe a tensor, an array or a data frame that would not be printed whole; return None for all else."""
    library = type(value).__module__.partition(".")[0]
    if type(value).__name__ == "DataFrame" and library in ("pandas", "polars"):
        return _describe_frame(value) if is_long(value) else None
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        has_bits = value.layout is torch.strided and not value.is_meta
        return _describe_array(value) if has_bits and value.numel() > LARGE and "..." in repr(value) else None
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in _NUMBERS:
        return _describe_array(value) if value.size > LARGE and "..." in repr(value) else None
    return None


def is_long(frame: Any) -> bool:
    """Whether a data frame has more rows than are printed."""
    return bool(frame.shape[0] > LARGE_ROWS)


def _describe_frame(frame: Any) -> str:
    rows, columns = frame.shape
    names = list(frame.columns)[:COLUMNS]
    lines = [(str(name), str(frame[name].dtype), _describe_column(frame[name])) for name in names]
    more = [f"  and {columns - COLUMNS} more columns"] if columns > COLUMNS else []
    return str(Table((), lines, title=f"DataFrame ({rows}, {columns})", notes=more))


def _describe_column(column: Any) -> str:
    try:
        array = column.to_numpy()
        return describe_numbers(array) if array.dtype.kind in _NUMBERS else ""
    except Exception:  # of a type of column that its library cannot convert
        return ""


def _describe_array(value: Any) -> str:
    kind = "tensor" if type(value).__name__ == "Tensor" else type(value).__name__
    where = f" {value.device}" if hasattr(value, "is_meta") else ""
    head = f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
    if hasattr(value, "to_local"):
        placements = ", ".join(map(str, value.placements))
        value = value.to_local()
        head = f"{head} [{placements}], this rank's part {tuple(value.shape)}"
    try:
        return f"{head}: {describe_numbers(value)}" if value.shape.count(0) == 0 else head
    except Exception:  # of a dtype without numbers, or where there is no room left
        return head


def describe_numbers(value: Any) -> str:
    """Write the least, the mean and the greatest number, how many are not finite, and the fingerprint.

    Raises: errors of the value's library, for dtypes that have no numbers.
    """
    import numpy

    flat = value.reshape(-1)[:LOOKED_AT]
    if hasattr(value, "is_meta"):
        torch = sys.modules["torch"]
        flat = flat.detach().resolve_conj().resolve_neg().cpu()
        words = flat.contiguous().view(torch.uint8).numpy()
        has_twin = str(flat.dtype).removeprefix("torch.") in numpy.sctypeDict
        numbers = (flat if has_twin else flat.float()).numpy()
    else:
        words = numbers = numpy.ascontiguousarray(flat)
    bits = f"bits {zlib.crc32(memoryview(words).cast('B')):08x}"
    numbers = abs(numbers) if numbers.dtype.kind == "c" else numbers
    odd = []
    if not numpy.isfinite(numbers.min() + numbers.max() if numbers.dtype.kind == "f" else 0):
        counts = ((int(numpy.isnan(numbers).sum()), "NaN"), (int(numpy.isinf(numbers).sum()), "inf"))
        odd = [", ".join(f"{count:,} {name}" for count, name in counts if count)]
        numbers = numbers[numpy.isfinite(numbers)]
    shown = "no finite number"
    if numbers.size:
        low, mean, high = (float(each) for each in (numbers.min(), numbers.mean(dtype="float64"), numbers.max()))
        shown = f"min {low:.4g}, mean {mean:.4g}, max {high:.4g}"
    part = [f"of the first {len(flat):,}"] if len(flat) == LOOKED_AT else []
    return "; ".join([shown, *odd, *part, bits])
