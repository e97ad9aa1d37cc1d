"""The values of the members of a mesh, as a call on many ranks returns them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshbook.errors import LayoutError, RankError, UsageError
from meshbook.formatting import format_sizes, name_ranks
from meshbook.shape import value_tables
from meshbook.shape.members import Members, MeshView, Point
from meshbook.shape.ndslice import Shape
from meshbook.shape.value_tables import to_frame

if TYPE_CHECKING:
    import numpy

T = TypeVar("T")
U = TypeVar("U")

_making = threading.Lock()


def _operator(function: Callable[..., object], *, swapped: bool = False) -> Callable[[Any, object], ValueMesh[Any]]:
    """Return the method that applies an operator to the value of each rank."""

    def apply(self: ValueMesh[Any], other: object) -> ValueMesh[Any]:
        others = self._matched(other)
        pairs = zip(others, self.values(), strict=True) if swapped else zip(self.values(), others, strict=True)
        return ValueMesh(self._members, [function(left, right) for left, right in pairs])

    return apply


def _unary(function: Callable[[Any], object]) -> Callable[[Any], ValueMesh[Any]]:
    return lambda self: self.map(function)


class ValueMesh(MeshView, Generic[T]):
    """Values arranged as the members that gave them. Immutable; iterates as (point, value), in C order.

    ``values[2]`` is the value of rank 2. Operators act on the value of each rank: ``loss + 1``, ``loss < 0.5``,
    ``loss - baseline`` of two meshes with the same members. Two meshes compared by ``==`` give one bool.
    """

    __slots__ = ("_load", "_made")
    __array_priority__ = 1000  # so that NumPy leaves operators to this class
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

    def __getitem__(self, rank: int) -> T:
        """The value of base rank ``rank``, the number in front of a value that is shown.

        Raises: RankError if it is no member, UsageError for anything but a number.
        """
        if not hasattr(rank, "__index__"):
            axis = next(iter(self.sizes), "rank")
            raise UsageError(
                "a ValueMesh is indexed by the number of a rank.\n"
                f"  by coordinates: .item({axis}=0)    a part: .slice({axis}=slice(0, 2))"
            )
        return self.get(operator.index(rank))

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

    __add__, __radd__ = _operator(operator.add), _operator(operator.add, swapped=True)
    __sub__, __rsub__ = _operator(operator.sub), _operator(operator.sub, swapped=True)
    __mul__, __rmul__ = _operator(operator.mul), _operator(operator.mul, swapped=True)
    __matmul__, __rmatmul__ = _operator(operator.matmul), _operator(operator.matmul, swapped=True)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _operator(operator.truediv, swapped=True)
    __floordiv__, __rfloordiv__ = _operator(operator.floordiv), _operator(operator.floordiv, swapped=True)
    __mod__, __rmod__ = _operator(operator.mod), _operator(operator.mod, swapped=True)
    __pow__, __rpow__ = _operator(operator.pow), _operator(operator.pow, swapped=True)
    __and__, __rand__ = _operator(operator.and_), _operator(operator.and_, swapped=True)
    __or__, __ror__ = _operator(operator.or_), _operator(operator.or_, swapped=True)
    __xor__, __rxor__ = _operator(operator.xor), _operator(operator.xor, swapped=True)
    __lt__, __le__ = _operator(operator.lt), _operator(operator.le)
    __gt__, __ge__ = _operator(operator.gt), _operator(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)

    def _matched(self, other: object) -> list[Any]:
        """Return the other operand of each rank. Raises: LayoutError for a mesh of other members."""
        if not isinstance(other, ValueMesh):
            return [other] * len(self)
        if self.extent != other.extent or self.ranks != other.ranks:
            one, another = (f"{format_sizes(each.sizes)} of {name_ranks(each.ranks)}" for each in (self, other))
            raise LayoutError(f"values of different members have no operator between them: {one}, and {another}")
        return other.values()

    def __bool__(self) -> bool:
        """The truth of the only value. Raises: UsageError where there are several."""
        if len(self) != 1:
            raise UsageError(
                f"the values of {len(self)} ranks have no single truth.\n"
                "  say which: all(values.values()), any(values.values()), or values[0]"
            )
        return bool(self.values()[0])

    def __ne__(self, other: object) -> Any:
        return not self == other if isinstance(other, ValueMesh) else _operator(operator.ne)(self, other)

    def __eq__(self, other: object) -> Any:
        """Whether ranks, axes and values are equal; arrays and tensors are equal if all their elements are.

        Anything but a ValueMesh is compared with the value of each rank.
        """
        if not isinstance(other, ValueMesh):
            return _operator(operator.eq)(self, other)
        return (
            self.extent == other.extent
            and self.ranks == other.ranks
            and all(_equal(*pair) for pair in zip(self.values(), other.values(), strict=True))
        )

    def __reduce__(self) -> tuple[type[ValueMesh[Any]], tuple[Members, list[T]]]:
        once: dict[Any, Any] = {}  # equal texts of a thousand ranks take the room of one
        values = [once.setdefault(value, value) if type(value) is str else value for value in self.values()]
        return ValueMesh, (self._members, values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        """Return one array: the axes of the mesh, then those of the values; of objects where shapes differ."""
        import numpy

        values = [numpy.asarray(value) for value in self.values()]
        shape = self.extent.shape
        if len({value.shape for value in values}) == 1:
            return numpy.array(values, dtype).reshape(*shape, *values[0].shape)
        objects = numpy.empty(len(values), object)
        for index, value in enumerate(self.values()):
            objects[index] = value
        return objects.reshape(shape)

    def frame(self) -> Any:
        """Return a table with a row per rank: its number, its coordinates, its value (of a dict, a column per key).

        It is a DataFrame of pandas or Polars: of the one that is imported, else of the one that is installed.
        Raises: UsageError where neither is.
        """
        return to_frame(value_tables.to_rows(self.ranks, list(self)))

    def __repr__(self) -> str:
        """A table of at most a screen: ranks with an equal repr share a row, long ones are cut."""
        return str(value_tables.to_table(self.sizes, self._texts()))

    def _repr_html_(self) -> str:
        """The table of `__repr__` as HTML; the values of two axes lie in a grid."""
        return value_tables.to_table(self.sizes, self._texts(), is_grid=True)._repr_html_()

    def _texts(self) -> list[tuple[int, str]]:
        """Return each rank with the repr of its value."""
        return [
            (rank, value_tables.describe(_load, value))
            for rank, value in zip(self._members.ranks(), self._values, strict=True)
        ]

    def _part(self, members: Members) -> ValueMesh[T]:
        part: ValueMesh[T] = ValueMesh.__new__(ValueMesh)
        values = self._values
        part._members, part._made = members, [values[self._members.point(rank).rank] for rank in members.ranks()]
        return part


class _Lazy(Generic[T]):
    """A value that is made when it is first looked at."""

    __slots__ = ("_load", "_lock", "_rank")

    def __init__(self, load: Callable[[int], T], rank: int) -> None:
        self._load, self._rank = load, rank
        self._lock = threading.Lock()

    def load(self) -> T:
        with self._lock:
            value = self._load(self._rank)
            self._load = lambda rank: value
            return value


def _load(value: T | _Lazy[T]) -> T:
    return value.load() if isinstance(value, _Lazy) else value


def _equal(left: object, right: object) -> bool:
    if left is right:
        return True
    if isinstance(left, ValueMesh) or isinstance(right, ValueMesh):
        return isinstance(left, ValueMesh) and isinstance(right, ValueMesh) and bool(left == right)
    if getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    same = left == right
    return bool(same.all() if hasattr(same, "all") else same)
