"""The members of a mesh and their arrangement: slices of base ranks, views over them, and ranks that get other numbers.

An extent names axes and gives them sizes; the last axis varies fastest (C order, as NumPy). A view chooses
members of a mesh and arranges them again, but each keeps its base rank. hosts=2, gpus=4, and two views of it:

                              slice(gpus=slice(0, None, 2))   slice(hosts=1).split(gpus=("dp", "tp"), tp=2)

             gpus 0   1   2   3          gpus 0   1                        tp 0   1
    hosts 0 |     0   1   2   3   hosts 0 |   0   2                   dp 0 |  4   5
          1 |     4   5   6   7         1 |   4   6                      1 |  6   7

    Piece   (0, (2, 4), (4, 1))           (0, (2, 2), (4, 2))                (4, (2, 2), (2, 1))
            offset, sizes, strides: member (i, j) has base rank  offset + i * strides[0] + j * strides[1]

No axis of a mesh ever moves past another, and one step along an axis is longer than all that lies inside it. Hence
strides fall from the first axis to the last, and one division per axis tells whether a rank belongs.

A `Region` is such an affine view: a few short tuples, however many ranks. A `Picked` is any other choice
(gpus 0, 1 and 3): an extent with a list of base ranks. Both are `Members` and answer the same questions. The
algebra is written once, on places: of a region these are its base ranks, of a `Picked` positions in its list.
A `MeshView` is a mesh, or a part of one, that has members.

Ranks get other numbers when a mesh grows or shrinks; a process that was known by its rank is found by the moves since:

    generation 0   rank 0  1  2  3
    shrinks             |  x  |  |      moves[0] = (0, GONE, 1, 2)
    generation 1   rank 0     1  2
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias, TypeVar

from meshbook.errors import LayoutError, RankError
from meshbook.formatting import format_sizes, format_some_ranks
from meshbook.shape.extent import (
    Choice,
    Extent,
    Index,
    Point,
    check_names,
    infer_sizes,
    parse_size,
    refuse_twice,
    resolve,
    resolve_list,
)

__all__ = [
    "AS_NOW",
    "GONE",
    "Choice",
    "Extent",
    "Index",
    "Members",
    "MeshView",
    "Moves",
    "Picked",
    "Piece",
    "Point",
    "Region",
    "arrange",
    "arranged_now",
    "dense",
    "group",
    "members_of",
    "ranks_now",
    "step_of",
]  # fmt: skip

Self = TypeVar("Self", bound="MeshView")

_SHOWN_CHARS = 60
"""The length of a list of ranks in a message."""


class Piece(NamedTuple):
    """Base ranks ``offset + sum(i * stride)``, ``0 <= i < size`` along each axis: a piece of a target."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """The distance from the lowest member to the highest."""
        return sum((size - 1) * abs(stride) for size, stride in zip(self.sizes, self.strides, strict=True))

    def find(self, rank: int) -> int | None:
        """The position of ``rank`` in C order, or None if it is no member; O(axes)."""
        rest = rank - self.offset
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if stride < 0:  # count from the lowest member
                rest -= (size - 1) * stride
        position = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            index, rest = divmod(rest, abs(stride))
            if not 0 <= index < size:
                return None
            position = position * size + (index if stride > 0 else size - 1 - index)
        return None if rest else position

    def has(self, rank: int) -> bool:
        """Whether ``rank`` is a member; O(axes)."""
        return self.find(rank) is not None

    def ranks(self) -> Iterator[int]:
        """Every member's base rank, in C order."""
        if math.prod(self.sizes) == 1:  # each call to one rank asks
            return iter((self.offset,))
        if len(self.sizes) == 1 and (step := self.strides[0]):
            return iter(range(self.offset, self.offset + self.sizes[0] * step, step))
        return self._ranks()

    def _ranks(self) -> Iterator[int]:
        *outer, inner = (
            [i * stride for i in range(size)] for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        for moves in product(*outer):
            start = self.offset + sum(moves)
            for step in inner:
                yield start + step

    def is_nested(self) -> bool:
        """Whether a step along each axis is longer than all that lies inside it, and no rank is negative."""
        reach = low = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1:
                if abs(stride) <= reach:
                    return False
                reach += (size - 1) * abs(stride)
                low += min(0, (size - 1) * stride)
        return self.offset + low >= 0


def dense(shape: Sequence[int]) -> Piece:
    """The slice of all ranks of an extent with sizes ``shape``: 0, 1, 2, ..."""
    return Piece(0, tuple(shape), tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))


def fit(shape: Sequence[int], ranks: Sequence[int]) -> Piece | None:
    """The slice of sizes ``shape`` whose ranks in C order are ``ranks``, or None if there is none."""
    steps = dense(shape).strides
    strides = tuple(ranks[step] - ranks[0] if size > 1 else 1 for size, step in zip(shape, steps, strict=True))
    candidate = Piece(ranks[0], tuple(shape), strides)
    return candidate if candidate.is_nested() and list(candidate.ranks()) == list(ranks) else None


def group(ranks: Iterable[int]) -> tuple[Piece, ...]:
    """Few slices whose ranks, one after the other, are ``ranks``; each rank occurs once.

    Evenly spaced neighbours become a run, evenly spaced equal runs become a slice of two axes, and so on.
    """
    parts = [Piece(rank, (), ()) for rank in ranks]
    while True:
        grouped = _group_once(parts)
        if len(grouped) == len(parts):
            return tuple(parts)
        parts = grouped


def _group_once(parts: Sequence[Piece]) -> list[Piece]:
    grouped: list[Piece] = []
    start = 0
    while start < len(parts):
        first = parts[start]
        end = start + 1
        if end < len(parts):
            step = parts[end].offset - first.offset
            while (
                end < len(parts)
                and abs(step) > first.span
                and parts[end].offset - parts[end - 1].offset == step
                and parts[end][1:] == first[1:]
            ):
                end += 1
        if end > start + 1:
            first = Piece(first.offset, (end - start, *first.sizes), (step, *first.strides))
        grouped.append(first)
        start = end
    return grouped


class Members(ABC):
    """Members of a mesh, arranged by an extent. They are immutable; every view is a new object."""

    extent: Extent
    encoded: tuple[Piece, ...]
    """Few slices whose ranks, one after the other, are those of `ranks`."""

    @abstractmethod
    def ranks(self) -> Iterator[int]:
        """Every member's base rank, in C order."""

    @abstractmethod
    def find(self, rank: int) -> int | None:
        """The position of base rank ``rank`` in C order, or None if it is no member."""

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The members' base ranks; each call asks for them."""
        return frozenset(self.ranks())

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the values that were computed from it."""
        return {name: value for name, value in vars(self).items() if name not in ("rank_set", "_positions")}

    @abstractmethod
    def _places(self) -> Region:
        """The region on which views are computed."""

    @abstractmethod
    def _at(self, places: Region) -> Members:
        """Return the members at these places."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The axis names, in order."""
        return self.extent.names

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in axis order."""
        return dict(self.extent)

    def size(self, axes: str | Iterable[str] | None = None) -> int:
        """The size of an axis, or the product over several, or over all.

        Raises: UnknownAxisError.
        """
        labels = self.labels if axes is None else (axes,) if isinstance(axes, str) else axes
        return math.prod(self.extent.size(label) for label in labels)

    def __len__(self) -> int:
        return self.extent.nelements

    def has(self, rank: int) -> bool:
        """Whether base rank ``rank`` is a member."""
        return self.find(rank) is not None

    def point(self, rank: int) -> Point:
        """Return the coordinates of base rank ``rank`` here; the point's own ``rank`` is its position here.

        Raises: RankError if it is no member.
        """
        position = self.find(rank)
        if position is None:
            raise RankError(rank, "rank", len(self), format_some_ranks(self.ranks(), _SHOWN_CHARS))
        return Point(position, self.extent)

    def rank_at(self, **coordinates: int) -> int:
        """Return the base rank at the given coordinates, one for each axis; negative ones count from the end.

        Raises: UnknownAxisError, RankError, and LayoutError if a coordinate is missing.
        """
        self.extent.require_all(coordinates)
        return next(self.slice(**coordinates).ranks())

    def slice(self, **axes: Choice) -> Members:
        """Return a part: an int drops its axis, a slice or a list of indices keeps it, as in NumPy.

        Negative numbers count from the end. A list keeps its own order.
        Raises: UnknownAxisError, RankError if nothing is selected, UsageError for a value that is no index,
        LayoutError if a list names an index twice.
        """
        lists = {
            label: resolve_list(chosen, label, self.extent.size(label))
            for label, chosen in axes.items()
            if isinstance(chosen, Iterable) and not isinstance(chosen, str)
        }
        part = self._slice({label: chosen for label, chosen in axes.items() if label not in lists})
        if not lists:
            return part
        indices = [lists.get(label, range(size)) for label, size in part.sizes.items()]
        steps = [
            [index * stride for index in along]
            for along, stride in zip(indices, dense(part.extent.shape).strides, strict=True)
        ]
        ranks = list(part.ranks())
        extent = Extent(part.labels, tuple(len(along) for along in indices))
        return arrange(extent, [ranks[sum(moves)] for moves in product(*steps)])

    def _slice(self, axes: Mapping[str, Any]) -> Members:
        for label in axes:
            self.extent.axis(label)
        places = self._places()
        offset = places.layout.offset
        kept: list[tuple[str, int, int]] = []
        for label, size, stride in places.axes():
            chosen = resolve(axes.get(label, slice(None)), label, size)
            if isinstance(chosen, int):
                offset += chosen * stride
            else:
                offset += chosen.start * stride
                kept.append((label, len(chosen), chosen.step * stride))
        return self._at(Region.build(offset, kept))

    def select(self, ranks: Iterable[int]) -> Members:
        """Return the members with these base ranks, in this order, on one axis ``rank``.

        Raises: RankError if one is no member or none is given, LayoutError if one is given twice.
        """
        chosen = [operator.index(rank) for rank in ranks]
        for rank in chosen:
            self.point(rank)
        if not chosen:
            raise RankError("[]", "rank", len(self), format_some_ranks(self.ranks(), _SHOWN_CHARS))
        refuse_twice(chosen, "rank")
        return arrange(Extent(("rank",), (len(chosen),)), chosen)

    def split(self, **axes: Sequence[str] | int) -> Members:
        """Replace axes by several each: ``split(gpus=("dp", "tp"), tp=2)``; one size of each may be left out.

        Raises: UnknownAxisError, and LayoutError if the sizes do not multiply to that of the axis.
        """
        names = {label: tuple(value) for label, value in axes.items() if isinstance(value, tuple | list)}
        sizes = {label: parse_size(value, label) for label, value in axes.items() if label not in names}
        for label in names:
            self.extent.axis(label)
        for label in sizes:
            if not any(label in new for new in names.values()):
                raise LayoutError(f'a size is given for "{label}", which is none of the new axes: {axes}')
        places = self._places()
        parts: list[tuple[str, int, int]] = []
        for label, size, stride in places.axes():
            if label in names:
                new_sizes = infer_sizes(label, size, names[label], sizes)
                new_strides = [step * stride for step in dense(new_sizes).strides]
                parts += zip(names[label], new_sizes, new_strides, strict=True)
            else:
                parts.append((label, size, stride))
        return self._at(Region.build(places.layout.offset, parts))

    def flatten(self, name: str) -> Members:
        """Lay all axes end to end as one axis ``name``.

        Raises: LayoutError if the ranks are not evenly spaced, so that no single stride describes them.
        """
        check_names([name])
        places = self._places()
        axes = [axis for axis in places.axes() if axis[1] > 1]
        for (outer, _, outer_stride), (inner, size, stride) in pairwise(axes):
            if outer_stride != size * stride:
                ranks = format_some_ranks(self.ranks(), _SHOWN_CHARS)
                raise LayoutError(
                    f'{format_sizes(self.sizes)} cannot be flattened into "{name}": a step along {outer} '
                    f"moves {abs(outer_stride)} ranks, but {inner}={size} takes up {abs(size * stride)}. "
                    f"Its ranks are {ranks}; select them by number to have them on one axis."
                )
        return self._at(Region.build(places.layout.offset, [(name, len(self), axes[-1][2] if axes else 1)]))

    def rename(self, **names: str) -> Members:
        """Give axes other names, all at once, so that two may swap: ``rename(hosts="dp")``.

        Raises: UnknownAxisError, and LayoutError for a name that is taken or cannot name an axis.
        """
        for label in names:
            self.extent.axis(label)
        return self._at(Region(tuple(names.get(label, label) for label in self.labels), self._places().layout))


@dataclass(frozen=True)
class Region(Members):
    """An affine view: axis names and the `Piece` of base ranks that they index. O(axes) in every respect.

    Raises: LayoutError if the names and sizes make no extent, or the strides reach a rank twice.
    """

    names: tuple[str, ...]
    layout: Piece

    def __post_init__(self) -> None:
        object.__setattr__(self, "extent", Extent(self.names, self.layout.sizes))
        if not self.layout.is_nested():
            raise LayoutError(f"axes overlap in {self.layout}; a stride must exceed all that lies inside it")
        offset, sizes, strides = self.layout
        used = tuple(stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True))
        layout = Piece(offset, sizes, used)  # so that equal views are equal
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "encoded", (layout,))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Region:
        """Return the region of all members of a mesh with these axes: base ranks 0, 1, 2, ..."""
        return cls(tuple(sizes), dense(Extent.of(sizes).shape))

    @classmethod
    def build(cls, offset: int, axes: Sequence[tuple[str, int, int]]) -> Region:
        """The region with these axes, each as (name, size, stride)."""
        names, sizes, strides = zip(*axes, strict=True) if axes else ((), (), ())
        return cls(names, Piece(offset, sizes, strides))

    def axes(self) -> list[tuple[str, int, int]]:
        """(name, size, stride) of each axis, in order."""
        return list(zip(self.names, self.layout.sizes, self.layout.strides, strict=True))

    def ranks(self) -> Iterator[int]:
        return self.layout.ranks()

    def find(self, rank: int) -> int | None:
        return self.layout.find(rank)

    def _places(self) -> Region:
        return self

    def _at(self, places: Region) -> Members:
        return places


@dataclass(frozen=True)
class Picked(Members):
    """Members that no single `Piece` describes: an extent and the base rank of each point, in C order."""

    extent: Extent
    members: tuple[int, ...]

    def ranks(self) -> Iterator[int]:
        return iter(self.members)

    def find(self, rank: int) -> int | None:
        return self._positions.get(rank)

    @cached_property
    def encoded(self) -> tuple[Piece, ...]:  # type: ignore[override]
        return group(self.members)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.members)}

    def _places(self) -> Region:
        return Region(self.extent.names, dense(self.extent.shape))

    def _at(self, places: Region) -> Members:
        return arrange(places.extent, [self.members[place] for place in places.ranks()])


def arrange(extent: Extent, ranks: Sequence[int]) -> Members:
    """The members ``ranks`` (distinct, in C order) laid out as ``extent``; a `Region` if one fits."""
    layout = fit(extent.shape, ranks)
    return Picked(extent, tuple(ranks)) if layout is None else Region(extent.names, layout)


Moves: TypeAlias = tuple[tuple[int, ...], ...]
"""The ranks' numbers in the next generation, for each generation but the last, whose number is the length."""

GONE = -1

AS_NOW = -1
"""The generation of ranks that are already today's."""


def step_of(moved: Mapping[int, int], size: int) -> tuple[int, ...]:
    """Return the moves of a mesh of ``size`` ranks. moved: old rank to new rank, for ranks that stay."""
    return tuple(moved.get(rank, GONE) for rank in range(size))


def ranks_now(moves: Moves, generation: int, ranks: Iterable[int]) -> list[int]:
    """Return today's numbers of ``ranks`` of a generation; GONE for ranks that have left."""
    found = list(ranks)
    for step in moves[generation:] if generation != AS_NOW else ():
        found = [step[rank] if 0 <= rank < len(step) else GONE for rank in found]
    return found


def arranged_now(members: Members, now: Sequence[int]) -> Members:
    """The same processes in the same arrangement, under the ranks that they have ``now``."""
    return members if list(members.ranks()) == list(now) else arrange(Extent.of(members.sizes), now)


class MeshView:
    """Base of ProcMesh and ValueMesh. A subclass says how a view of it is made (`_part`)."""

    __slots__ = ("_members",)

    def __init__(self, members: Members) -> None:
        self._members = members

    def _part(self: Self, members: Members) -> Self:
        raise NotImplementedError

    @property
    def extent(self) -> Extent:
        return self._members.extent

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in axis order."""
        return self._members.sizes

    @property
    def ranks(self) -> tuple[int, ...]:
        """The base ranks in C order of the axes."""
        return tuple(self._members.ranks())

    def size(self, axes: str | Iterable[str] | None = None) -> int:
        """Members along ``axes``; all of them by default. Raises: UnknownAxisError."""
        return self._members.size(axes)

    def __len__(self) -> int:
        return len(self._members)

    def slice(self: Self, **axes: Choice) -> Self:
        """Return a part as NumPy would cut it: an int drops its axis, a slice or a list of indices keeps it.

        Raises: UnknownAxisError, RankError, LayoutError if a list names an index twice.
        """
        return self._part(self._members.slice(**axes))

    def select(self: Self, ranks: Iterable[int]) -> Self:
        """A view of chosen base ranks along one axis ``rank``. Raises: RankError."""
        return self._part(self._members.select(ranks))

    def split(self: Self, **axes: Sequence[str] | int) -> Self:
        """Make several axes of one: ``split(gpus=("dp", "tp"), tp=2)``. Raises: LayoutError."""
        return self._part(self._members.split(**axes))

    def flatten(self: Self, name: str) -> Self:
        """Make one axis of all. Raises: LayoutError where no stride can describe it."""
        return self._part(self._members.flatten(name))

    def rename(self: Self, **names: str) -> Self:
        """Give axes other names, all at once: ``rename(hosts="dp")``. Raises: UnknownAxisError, LayoutError."""
        return self._part(self._members.rename(**names))


def members_of(view: MeshView) -> Members:
    """Return the base ranks of a mesh or a view, arranged by its axes."""
    return view._members
