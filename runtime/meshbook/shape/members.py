"""How the members of a mesh are arranged: extents, points, and views over base ranks.

An extent names axes and gives them sizes; the last axis varies fastest (C order, as NumPy). A view chooses
members of a mesh and arranges them anew, but each keeps its base rank. hosts=2, gpus=4, and two views of it:

                              slice(gpus=slice(0, None, 2))   slice(hosts=1).split(gpus=("dp", "tp"), tp=2)

             gpus 0   1   2   3          gpus 0   1                        tp 0   1
    hosts 0 |     0   1   2   3   hosts 0 |   0   2                   dp 0 |  4   5
          1 |     4   5   6   7         1 |   4   6                      1 |  6   7

    Piece   (0, (2, 4), (4, 1))           (0, (2, 2), (4, 2))                (4, (2, 2), (2, 1))
            offset, sizes, strides: member (i, j) has base rank  offset + i * strides[0] + j * strides[1]

A `Region` is such an affine view: a few short tuples, however many ranks. A `Picked` is any other choice
(gpus 0, 1 and 3): an extent with a list of base ranks. Both are `Members` and answer the same questions. The
algebra is written once, on places: of a region these are its base ranks, of a `Picked` positions in its list.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any

from meshbook.errors import LayoutError, RankError
from meshbook.formatting import format_sizes, format_some_ranks
from meshbook.shape.extent import Extent, Point, check_names
from meshbook.shape.indexing import Choice, Index, infer_sizes, parse_size, refuse_twice, resolve, resolve_list
from meshbook.shape.slices import Piece, dense, fit, group

__all__ = ["Choice", "Extent", "Index", "Members", "Picked", "Piece", "Point", "Region", "arrange"]

_SHOWN_CHARS = 60
"""How much of a list of ranks a message shows."""


class Members(ABC):
    """Some members of a mesh, arranged by an extent. Immutable; every view is a new object."""

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
        """What it is, without what was made of that."""
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
        """All members of a mesh with these axes: base ranks 0, 1, 2, ..."""
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
