"""Slices and shapes with Monarch's names and meanings, for programs that compute with ranks themselves.

    Slice   offset, sizes and strides over ranks: a sequence of ranks, in C order. NDSlice is another name for it.
    Shape   a slice whose axes have names

Meshes use `meshbook.shape` inside.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from meshbook.errors import LayoutError, NegativeIndexError, RankError
from meshbook.shape.extent import Extent, Point
from meshbook.shape.members import Members, Piece, Region, dense, group

AnyShape = TypeVar("AnyShape", bound="Shape")


class Slice(Sequence[int]):
    """The ranks ``offset + sum(i * stride)``, ``0 <= i < size`` along each axis; the last axis varies fastest."""

    __slots__ = ("_piece",)

    def __init__(self, offset: int, sizes: Iterable[int], strides: Iterable[int]) -> None:
        """Raises: LayoutError if there is not one stride for each size, or two axes have the same."""
        self._piece = Piece(
            operator.index(offset), tuple(map(operator.index, sizes)), tuple(map(operator.index, strides))
        )
        if len(self._piece.sizes) != len(self._piece.strides):
            raise LayoutError(f"sizes {self.sizes} do not fit strides {self.strides}; give as many of each")
        used = [stride for size, stride in zip(self._piece.sizes, self._piece.strides, strict=True) if size > 1]
        if len(set(used)) < len(used):
            raise LayoutError(f"two axes have the same stride in {self}, so they have ranks in common")

    @staticmethod
    def new_row_major(sizes: Iterable[int]) -> Slice:
        """Return the slice of ranks 0, 1, 2, ... laid out densely."""
        return Slice(*dense(tuple(sizes)))

    @staticmethod
    def from_list(ranks: Iterable[int]) -> list[Slice]:
        """Few slices whose ranks, one slice after the other, are these."""
        return [Slice(*piece) for piece in group(ranks)]

    @property
    def offset(self) -> int:
        """The first rank of the slice."""
        return self._piece.offset

    @property
    def sizes(self) -> list[int]:
        return list(self._piece.sizes)

    @property
    def strides(self) -> list[int]:
        return list(self._piece.strides)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._piece.sizes)

    @property
    def total(self) -> int:
        """The number of ranks, as ``len``."""
        return self._piece.total

    def ranks(self) -> Iterator[int]:
        """Return the ranks that iteration gives."""
        return self._piece.ranks()

    def find(self, rank: int) -> int | None:
        """The position of ``rank``, or None."""
        if self._piece.is_nested():
            return self._piece.find(rank)
        return next((position for position, one in enumerate(self) if one == rank), None)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The position of rank ``value``. Raises: RankError, a ValueError, if it is none of these."""
        position = self.find(value)
        if position is None or not range(len(self))[start:stop].count(position):
            raise RankError(value, "rank", len(self), str(list(self)))
        return position

    get_index = index

    def coordinates(self, value: int) -> list[int]:
        """The index of rank ``value`` along each axis. Raises: as `index`."""
        position = self.index(value)
        return [
            position // math.prod(self._piece.sizes[axis + 1 :]) % size for axis, size in enumerate(self._piece.sizes)
        ]

    def get(self, position: int) -> int:
        """The rank at a position, from 0. Raises: NegativeIndexError; RankError, a ValueError."""
        return self[_from_start(position)]

    def nditem(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates, one for each axis. Raises: RankError, an IndexError; LayoutError."""
        if len(coordinates) != self.ndim:
            raise LayoutError(f"{len(coordinates)} coordinates for {self.ndim} axes")
        for axis, (index, size) in enumerate(zip(coordinates, self._piece.sizes, strict=True)):
            if not 0 <= index < size:
                raise RankError(index, f"axis {axis}", size)
        steps = zip(coordinates, self._piece.strides, strict=True)
        return self.offset + sum(index * stride for index, stride in steps)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: builtins.slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | builtins.slice) -> int | tuple[int, ...]:
        if isinstance(index, builtins.slice):
            return tuple(self)[index]
        if not -len(self) <= index < len(self):
            raise RankError(index, "position", len(self))
        rest, rank = index % len(self), self.offset
        for size, stride in zip(reversed(self._piece.sizes), reversed(self._piece.strides), strict=True):
            rest, along = divmod(rest, size)
            rank += along * stride
        return rank

    def __iter__(self) -> Iterator[int]:
        return self._piece.ranks()

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.find(rank) is not None

    def __len__(self) -> int:
        return self._piece.total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and self._piece == other._piece

    def __hash__(self) -> int:
        return hash(self._piece)

    def __repr__(self) -> str:
        return f"Slice {{ offset: {self.offset}, sizes: {self.sizes}, strides: {self.strides} }}"


NDSlice = Slice


class Shape:
    """A slice whose axes have names."""

    __slots__ = ("members",)
    _KIND = "Shape"

    def __init__(self, labels: Iterable[str], slice: Slice) -> None:
        """Name the axes of a slice. Raises: LayoutError."""
        names = tuple(labels)
        if len(names) != slice.ndim:
            raise LayoutError(f"axis names {names} do not fit {slice}; give as many as it has sizes")
        self.members = Region(names, slice._piece)

    @classmethod
    def of(cls, members: Members) -> Shape:
        """The shape of a mesh. Raises: LayoutError where no slice describes its ranks."""
        if not isinstance(members, Region):
            raise LayoutError(f"no offset, sizes and strides describe the ranks {list(members.ranks())}")
        return Shape(members.names, Slice(*members.layout))

    @staticmethod
    def unity() -> Shape:
        """Return the shape of rank 0 alone, without axes."""
        return Shape([], Slice(0, [], []))

    @property
    def labels(self) -> list[str]:
        return list(self.members.names)

    @property
    def ndslice(self) -> Slice:
        return Slice(*self.members.layout)

    @property
    def extent(self) -> Extent:
        return self.members.extent

    @property
    def region(self) -> NamedRegion:
        return NamedRegion(self.labels, self.ndslice)

    def ranks(self) -> list[int]:
        """Return the ranks in C order."""
        return list(self.members.ranks())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis to index of a rank. Raises: RankError, a ValueError."""
        return dict(self.members.point(rank))

    def at(self, label: str, index: int) -> Shape:
        """Return the shape at ``index`` of axis ``label``, without that axis; counted from 0.

        Raises: UnknownAxisError, RankError: ValueErrors; NegativeIndexError, an OverflowError too.
        """
        return Shape.of(self.members.slice(**{label: _from_start(index)}))

    def index(self, **indices: int) -> Shape:
        """Return the shape at an index of several axes, as `at` does for one."""
        return Shape.of(self.members.slice(**{label: _from_start(index) for label, index in indices.items()}))

    def select(self, label: str, slice: builtins.slice) -> Shape:
        """A part of axis ``label``, which stays. Raises: as `at`."""
        return Shape.of(self.members.slice(**{label: slice}))

    def __len__(self) -> int:
        return len(self.members)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Shape) and self.members == other.members

    def __hash__(self) -> int:
        return hash(self.members)

    def __repr__(self) -> str:
        labels = ", ".join(f'"{label}"' for label in self.members.names)
        return f"{self._KIND} {{ labels: [{labels}], slice: {self.ndslice} }}"

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in self.members.sizes.items()) + "}"


class NamedRegion(Shape):
    """The Region of Monarch, which ``extent.region`` returns."""

    __slots__ = ()
    _KIND = "Region"

    def slice(self) -> Slice:
        return self.ndslice

    def as_shape(self) -> Shape:
        return Shape(self.labels, self.ndslice)

    def point_of_base_rank(self, rank: int) -> Point:
        """Return the point of a rank of the base. Raises: RankError."""
        return self.members.point(rank)


def _from_start(index: int) -> int:
    """Raises: NegativeIndexError."""
    if operator.index(index) < 0:
        raise NegativeIndexError(f"{index} is below 0: positions of a shape are counted from its start.")
    return operator.index(index)
