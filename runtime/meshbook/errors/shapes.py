"""Axes, ranks and layouts that a mesh does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshbook.errors.base import MeshError
from meshbook.formatting import did_you_mean, format_sizes, name_ranks


class ShapeError(MeshError, ValueError):
    """An axis, a rank or a layout that the mesh does not have. A ValueError too."""


class UnknownAxisError(ShapeError, KeyError, TypeError):
    """A name that is no axis of the mesh.

    A KeyError too, since points are mappings of axis to coordinate; and a TypeError, as of an argument of this name.
    """

    def __init__(self, axis: str, sizes: Mapping[str, int]) -> None:
        super().__init__(axis, dict(sizes))
        self.axis, self.sizes = axis, dict(sizes)

    def __str__(self) -> str:
        near = did_you_mean(self.axis, self.sizes)
        return f'unknown axis "{self.axis}"; this mesh has {format_sizes(self.sizes)}.{near}'


class RankError(ShapeError, IndexError):
    """A rank or an index outside its axis; an IndexError too.

    known: the ranks of a view that does not have them all.
    """

    def __init__(self, index: object, axis: str, size: int, known: str = "") -> None:
        super().__init__(index, axis, size, known)
        self.index, self.axis, self.size, self.known = index, axis, size, known

    def __str__(self) -> str:
        if self.known:
            return f"{self.axis}={self.index} selects nothing; the ranks here are {self.known}"
        if self.size == 0:
            return f"{self.axis}={self.index} selects nothing: the mesh is empty."
        return f"{self.axis}={self.index} selects nothing; {self.axis} runs from 0 to {self.size - 1}."


class NegativeIndexError(ShapeError, OverflowError):
    """An index below 0, where they are counted from the start."""


class LayoutError(ShapeError):
    """A view that no (offset, sizes, strides) over the base ranks can describe, or sizes that do not fit."""


class RanksLeft(MeshError):
    """A reference names processes that are no ranks any more: they left when their mesh shrank."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """ranks: as they were numbered when the reference was made."""
        self.left = tuple(ranks)
        super().__init__(self.left)

    def __str__(self) -> str:
        return (
            f"{name_ranks(self.left)} (as numbered when this reference was made) left the mesh when it shrank, and "
            "what was there is gone. Use a reference to what has stayed."
        )
