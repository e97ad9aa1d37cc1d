"""Axis names with their sizes, and places among them; ranks run in C order (the last axis varies fastest).

    Extent(("hosts", "gpus"), (2, 3))          gpus 0   1   2
                                     hosts 0 |      0   1   2         point(4) is hosts=1, gpus=1
                                           1 |      3   4   5

An `Index` or a `Choice` is a person's choice along an axis; it becomes numbers here, or an error that says which fit.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias

from meshbook.errors import LayoutError, RankError, UnknownAxisError, UsageError
from meshbook.formatting import format_sizes

if TYPE_CHECKING:
    from meshbook.shape.ndslice import NamedRegion


@dataclass(frozen=True, repr=False, init=False)
class Extent(Mapping[str, int]):
    """Axis names with their sizes, in order; no layout. A mapping of axis to size: ``extent["gpus"]``."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, labels: Iterable[str], sizes: Iterable[int]) -> None:
        """Raises: LayoutError for a name that is no identifier or occurs twice, and for a size below 1."""
        names = tuple(labels)
        check_names(names)
        shape = tuple(map(_whole, sizes))
        if len(names) != len(shape):
            raise LayoutError(f"axis names {names} do not fit sizes {shape}; give as many of each")
        for label, size in zip(names, shape, strict=True):
            if size < 1:
                raise LayoutError(f'axis "{label}" has size {size}; a size is at least 1')
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "shape", shape)

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Extent:
        """The extent with these axes, in the mapping's order."""
        return cls(sizes, sizes.values())

    @property
    def labels(self) -> list[str]:
        """The axis names, in order, as a list."""
        return list(self.names)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the axes, in order, as a list."""
        return list(self.shape)

    @functools.cached_property
    def nelements(self) -> int:
        """The number of points: the product of the sizes."""
        return math.prod(self.shape)

    @property
    def region(self) -> NamedRegion:
        """The region of all ranks, laid out densely."""
        from meshbook.shape.ndslice import NamedRegion, Slice

        return NamedRegion(self.names, Slice.new_row_major(self.shape))

    def __getitem__(self, label: str) -> int:
        return self.shape[self.axis(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def size(self, label: str) -> int:
        """The size of axis ``label``.

        Raises: UnknownAxisError.
        """
        return self.shape[self.axis(label)]

    def axis(self, label: str) -> int:
        """Return the position of axis ``label``, from 0.

        Raises: UnknownAxisError.
        """
        try:
            return self.names.index(label)
        except ValueError:
            raise UnknownAxisError(label, self) from None

    def point(self, rank: int) -> Point:
        """Return the point of ``rank``, 0 <= rank < self.nelements.

        Raises: RankError if rank is outside the extent.
        """
        return Point(rank, self)

    def rank(self, point: Mapping[str, int]) -> int:
        """The inverse of `point`; takes any mapping with one coordinate for each axis.

        Raises: UnknownAxisError, RankError, and LayoutError if a coordinate is missing.
        """
        self.require_all(point)
        rank = 0
        for label, size in zip(self.names, self.shape, strict=True):
            index = point[label]
            if not 0 <= index < size:
                raise RankError(index, label, size)
            rank = rank * size + index
        return rank

    def points(self) -> Iterator[Point]:
        """Return all points, in the order of ranks."""
        return (Point(rank, self) for rank in range(self.nelements))

    def require_all(self, given: Collection[str]) -> None:
        """Raises: UnknownAxisError if a name in ``given`` is no axis, LayoutError if an axis is not in it."""
        for label in given:
            self.axis(label)
        for label in self.names:
            if label not in given:
                raise LayoutError(f"{label} is missing; each axis of {format_sizes(self)} needs a number")

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label}: {size}" for label, size in self.items()) + "}"


class Point(Mapping[str, int]):
    """A place in an extent: axis name to coordinate. ``rank`` is its index there, in C order."""

    __slots__ = ("extent", "rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        """Raises: RankError if rank is outside the extent."""
        if not 0 <= rank < extent.nelements:
            raise RankError(rank, "rank", extent.nelements)
        self.rank, self.extent = rank, extent

    def size(self, label: str) -> int:
        """The extent's size along ``label``.

        Raises: UnknownAxisError.
        """
        return self.extent.size(label)

    def __getitem__(self, label: str) -> int:
        axis, shape = self.extent.axis(label), self.extent.shape
        return self.rank // math.prod(shape[axis + 1 :]) % shape[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent.names)

    def __len__(self) -> int:
        return len(self.extent.names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return (self.rank, self.extent) == (other.rank, other.extent)
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __reduce__(self) -> tuple[type[Point], tuple[int, Extent]]:
        return (Point, (self.rank, self.extent))

    def __repr__(self) -> str:
        coordinates = (f"{label!r}: {self[label]}/{size}" for label, size in self.extent.items())
        return "{" + ", ".join(coordinates) + "}"


def _whole(size: SupportsIndex) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise LayoutError(f"{size!r} is no size; a size is a whole number, at least 1") from None


def check_names(names: Iterable[str]) -> None:
    """Raises: LayoutError if a name is no identifier, is a word of Python's, or occurs twice."""
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise LayoutError(f"{name!r} cannot name an axis; use a plain name such as gpus or tp_2")
        if name in seen:
            raise LayoutError(f'two axes would be named "{name}"; each axis needs its own name')
        seen.add(name)


Index: TypeAlias = "int | slice"
Choice: TypeAlias = "int | slice | Iterable[int]"


def resolve(chosen: Index, label: str, size: int) -> int | range:
    """An index as a number from 0, a slice as the range of indices that it selects, never an empty one.

    Raises: RankError, and UsageError for an index of another type.
    """
    if isinstance(chosen, slice):
        text = _show_slice(chosen)
        try:
            indices = range(size)[chosen]
        except (TypeError, ValueError) as error:
            raise UsageError(f"{label}={text} is no slice: {error}") from None
        if not indices:
            raise RankError(text, label, size)
        return indices
    try:
        index = operator.index(chosen)
    except TypeError:
        raise UsageError(f"{label}={chosen!r} is no index; give a number such as 0, or slice(0, 2)") from None
    if not -size <= index < size:
        raise RankError(index, label, size)
    return index % size


def resolve_list(chosen: Iterable[int], label: str, size: int) -> list[int]:
    """Return the indices of a list as numbers from 0, in the list's order."""
    indices = [resolve(index, label, size) for index in chosen]
    numbers = [index for index in indices if isinstance(index, int)]
    if len(numbers) < len(indices):
        raise UsageError(f"{label}={chosen!r} holds a slice; give numbers, or the slice alone")
    if not numbers:
        raise RankError("[]", label, size)
    refuse_twice(numbers, label)
    return numbers


def infer_sizes(label: str, size: int, names: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """The sizes of the axes ``names`` into which axis ``label`` is split; at most one is not given."""
    unknown = [name for name in names if name not in given]
    known = math.prod(given[name] for name in names if name in given)
    parts = " x ".join(f"{name}={given[name]}" if name in given else name for name in names)
    if len(unknown) > 1:
        raise LayoutError(f"{label}={size} cannot be split into {parts}: give all sizes but one")
    if size % known or (not unknown and size != known):
        reason = f"{size} is not a multiple of {known}" if unknown else f"the sizes make {known}, not {size}"
        raise LayoutError(f"{label}={size} cannot be split into {parts}: {reason}")
    return [given.get(name, size // known) for name in names]


def parse_size(value: object, label: str) -> int:
    """The size that is given for a new axis ``label``."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f'{label}={value!r} is neither a size nor a list of names; as in gpus=("dp", "tp"), tp=2'
        ) from None
    if size < 1:
        raise LayoutError(f'axis "{label}" has size {size}; a size is at least 1')
    return size


def refuse_twice(indices: Sequence[int], label: str) -> None:
    """Raises: LayoutError if one of ``indices`` occurs again."""
    if len(set(indices)) < len(indices):
        twice = next(index for position, index in enumerate(indices) if index in indices[:position])
        raise LayoutError(f"{label} {twice} is chosen twice; a mesh has each member once")


def _show_slice(chosen: slice) -> str:
    bounds = [chosen.start, chosen.stop] + ([] if chosen.step is None else [chosen.step])
    return ":".join("" if bound is None else str(bound) for bound in bounds)
