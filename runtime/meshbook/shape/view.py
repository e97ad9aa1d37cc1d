"""What meshes of all kinds share: members arranged by named axes, and views of them (the names are Monarch's)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from meshbook.shape.extent import Extent
from meshbook.shape.members import Choice, Members

Self = TypeVar("Self", bound="MeshView")


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
    def _labels(self) -> tuple[str, ...]:
        """The axis names; programs for Monarch ask for them so."""
        return self._members.labels

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
