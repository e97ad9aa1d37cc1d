"""The values of the members of a mesh, as a call on many ranks returns them."""

from __future__ import annotations

import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from meshbook.errors import LayoutError, RankError
from meshbook.formatting import format_sizes, format_some_ranks
from meshbook.shape.members import Members, MeshView, Point
from meshbook.shape.ndslice import Shape

T = TypeVar("T")
U = TypeVar("U")

_making = threading.Lock()

_ROWS = 20
_ROW_CHARS = 100
_LABEL_CHARS = 24


class ValueMesh(MeshView, Generic[T]):
    """Values arranged as the members that gave them. Immutable; iterates as (point, value), in C order."""

    __slots__ = ("_load", "_made")
    _load: Callable[[int], T]
    """Makes the value of a rank; until `_made` is there."""

    def __init__(self, shape: Shape | Members, values: Iterable[T]) -> None:
        """values: one for each member, in C order.

        Raises: LayoutError if there are more or fewer.
        """
        members = shape.members if isinstance(shape, Shape) else shape
        super().__init__(members)
        self._made: list[T | _Lazy[T]] | None = list(values)
        if len(self._made) != len(members):
            raise LayoutError(f"{len(self._made)} values for the {len(members)} members of {members.extent}")

    @classmethod
    def from_indexed(cls, shape: Shape | Members, pairs: Iterable[tuple[int, T]]) -> ValueMesh[T]:
        """Return the mesh of (position, value) pairs in any order; the last value of a position counts.

        position: in C order, from 0. Raises: RankError for one outside, LayoutError if one is missing.
        """
        members = shape.members if isinstance(shape, Shape) else shape
        found: dict[int, T] = {}
        for position, value in pairs:
            if not 0 <= position < len(members):
                raise RankError(position, "position", len(members))
            found[position] = value
        missing = [position for position in range(len(members)) if position not in found]
        if missing:
            raise LayoutError(f"no values for the positions {missing} of {members.extent}")
        return cls(members, [found[position] for position in range(len(members))])

    @property
    def shape(self) -> Shape:
        """The ranks and the names of the axes. Raises: LayoutError where no slice describes the ranks."""
        return Shape.of(self._members)

    @classmethod
    def lazy(cls, members: Members, load: Callable[[int], T]) -> ValueMesh[T]:
        """Make the value of each rank by ``load(rank)`` when it is first looked at, once for all views of it.

        An error of ``load`` is raised to the reader of the value; the next read tries again.
        """
        lazy: ValueMesh[T] = cls.__new__(cls)
        lazy._members, lazy._made, lazy._load = members, None, load
        return lazy

    @property
    def _values(self) -> list[T | _Lazy[T]]:
        """The values in C order, made when they are first needed."""
        if self._made is None:
            with _making:
                if self._made is None:
                    self._made = [_Lazy(self._load, rank) for rank in self._members.ranks()]
                    del self._load
        return self._made

    def item(self, **coordinates: int) -> T:
        """The value at the given coordinates, one for each axis.

        Raises: UnknownAxisError, RankError, and LayoutError if a coordinate is missing.
        """
        return self.get(self._members.rank_at(**coordinates))

    def get(self, rank: int) -> T:
        """The value of base rank ``rank``.

        Raises: RankError if it is no member.
        """
        return _load(self._values[self._members.point(rank).rank])

    def values(self) -> list[T]:
        """Return the values in C order."""
        return [_load(value) for value in self._values]

    def items(self) -> list[tuple[Point, T]]:
        """Return the (point, value) pairs in C order."""
        return list(self)

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        for point, value in zip(self.extent.points(), self._values, strict=True):
            yield point, _load(value)

    def map(self, function: Callable[[T], U]) -> ValueMesh[U]:
        """Return the mesh of ``function(value)``."""
        return ValueMesh(self._members, [function(value) for value in self.values()])

    def flatten(self, name: str) -> ValueMesh[T]:
        """Return the values on one axis ``name``; unlike that of members, this is always possible.

        Raises: LayoutError if ``name`` cannot name an axis.
        """
        return self._part(self._members.select(self._members.ranks()).rename(rank=name))

    def __eq__(self, other: object) -> bool:
        """Whether ranks, axes and values are equal; arrays and tensors are equal if all their elements are."""
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return (
            self.extent == other.extent
            and self.ranks == other.ranks
            and all(_equal(*pair) for pair in zip(self.values(), other.values(), strict=True))
        )

    def __reduce__(self) -> tuple[Callable[..., ValueMesh[Any]], tuple[Members, list[tuple[T, int]]]]:
        """Pickle the values as runs: a thousand equal texts or numbers take the room of one."""
        return (_of_runs, (self._members, _runs(self.values())))

    def __repr__(self) -> str:
        """A table of at most a screen: ranks with an equal repr share a row, long ones are cut."""
        groups: dict[str, list[int]] = {}
        for rank, value in zip(self._members.ranks(), self._values, strict=True):
            groups.setdefault(_text(value), []).append(rank)
        rows = [(f"[{format_some_ranks(ranks, _LABEL_CHARS)}]", text) for text, ranks in groups.items()]
        hidden = rows[_ROWS:]
        rows = rows[: _ROWS - 1] if hidden else rows
        width = max(len(label) for label, _ in rows)
        lines = [f"ValueMesh: {format_sizes(self.sizes)}"]
        lines += [f"  {label:<{width}}  {_cut(text, _ROW_CHARS - width)}" for label, text in rows]
        if hidden:
            others = sum(len(ranks) for ranks in islice(groups.values(), _ROWS - 1, None))
            lines.append(f"  and {others} more ranks; .values() has all, .get(rank) one")
        return "\n".join(lines)

    def _part(self, members: Members) -> ValueMesh[T]:
        part: ValueMesh[T] = ValueMesh.__new__(ValueMesh)
        values = self._values
        part._members, part._made = members, [values[self._members.point(rank).rank] for rank in members.ranks()]
        return part


_ALIKE = frozenset({str, bytes, int, bool, type(None)})
"""The types whose equal values cannot be told apart."""


def _runs(values: Iterable[T]) -> list[tuple[T, int]]:
    """Return the runs of equal values, each with its length."""
    runs: list[tuple[T, int]] = []
    for value in values:
        last, count = runs[-1] if runs else (None, 0)
        if count and (value is last or (type(value) is type(last) and type(value) in _ALIKE and value == last)):
            runs[-1] = value, count + 1
        else:
            runs.append((value, 1))
    return runs


def _of_runs(members: Members, runs: list[tuple[T, int]]) -> ValueMesh[T]:
    return ValueMesh(members, [value for value, count in runs for _ in range(count)])


class _Lazy(Generic[T]):
    """A value that is made when it is first looked at."""

    __slots__ = ("_load", "_lock", "_rank", "_value")

    def __init__(self, load: Callable[[int], T], rank: int) -> None:
        self._load: Callable[[int], T] | None = load
        self._rank = rank
        self._lock = threading.Lock()
        self._value: T

    def load(self) -> T:
        with self._lock:
            if self._load is not None:
                self._value = self._load(self._rank)
                self._load = None
            return self._value


def _load(value: T | _Lazy[T]) -> T:
    return value.load() if isinstance(value, _Lazy) else value


def _equal(left: object, right: object) -> bool:
    if left is right:
        return True
    if isinstance(left, ValueMesh):
        return bool(left == right)
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    same = left == right
    return bool(same.all() if hasattr(same, "all") else same)


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


def _text(value: object) -> str:
    """The value's repr on one line, or why there is none."""
    try:
        return re.sub(r"\s*\n\s*", " ", _repr(_load(value)))
    except Exception as error:
        return f"<{type(error).__name__}: {error}>"


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 3] + "..."
