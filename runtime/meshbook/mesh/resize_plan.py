"""Which rank becomes which when a mesh grows or shrinks, and where new ones live. Pure.

     gpus 0  1         grow gpus=1         gpus 0  1  2      Plan.moved  0->0  1->1  2->3  3->4
  hosts 0 | 0  1       ----------->     hosts 0 | 0  1  2*        .new   2 on the host of 0 and 1, 5 on that of 3 and 4
        1 | 2  3                              1 | 3  4  5*

Ranks are always numbered in C order, so old ranks may get other numbers. A new point lives where the points beside it
live; along an axis that counts hosts every new index is a new host.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from meshbook.errors import UsageError
from meshbook.errors.advice import advice
from meshbook.formatting import format_ranks, format_sizes, name_ranks
from meshbook.shape.extent import Extent

PlannedHost = TypeVar("PlannedHost", bound=Hashable)


class NewHost(NamedTuple):
    """A host that is still to be started, by its coordinates along the axes that count hosts."""

    coordinates: tuple[int, ...]


@dataclass(frozen=True)
class Plan(Generic[PlannedHost]):  # no NamedTuple: Python 3.10 has no generic ones
    """What a mesh is to become."""

    extent: Extent
    placement: tuple[PlannedHost | NewHost, ...]
    """The host of each rank, then."""
    moved: Mapping[int, int]
    """Rank until now to rank then; who is missing leaves."""

    @property
    def new(self) -> list[int]:
        """The ranks that nobody has yet."""
        taken = set(self.moved.values())
        return [rank for rank in range(self.extent.nelements) if rank not in taken]


def plan_growth(
    extent: Extent, placement: Sequence[PlannedHost], more: Mapping[str, int], host_axes: Collection[str]
) -> Plan[PlannedHost]:
    """Add indices at the ends of axes.

    placement: the host of each rank now. host_axes: axes of size 1 that count hosts all the same.
    Raises: UnknownAxisError, UsageError for less than one.
    """
    check_steps(extent, more, "grow")
    then = Extent.of({axis: size + more.get(axis, 0) for axis, size in extent.items()})
    across = [axis for axis in extent.names if counts_hosts(extent, placement, axis, host_axes)]
    moved: dict[int, int] = {}
    hosts: list[PlannedHost | NewHost] = []
    for point in then.points():
        if all(index < extent[axis] for axis, index in point.items()):
            before = extent.rank(point)
            moved[before] = point.rank
            hosts.append(placement[before])
        elif any(point[axis] >= extent[axis] for axis in across):
            hosts.append(NewHost(tuple(point[axis] for axis in across)))
        else:
            beside = {axis: min(index, extent[axis] - 1) for axis, index in point.items()}
            hosts.append(placement[extent.rank(beside)])
    return Plan(then, tuple(hosts), moved)


def plan_shrinkage(
    extent: Extent, placement: Sequence[PlannedHost], fewer: Mapping[str, int], dead: Collection[int]
) -> Plan[PlannedHost]:
    """Remove indices of axes: those of dead ranks first, then from the end.

    Raises: UnknownAxisError, UsageError for less than one, for all, and where a dead rank would be left.
    """
    check_steps(extent, fewer, "shrink")
    for axis, count in fewer.items():
        if count >= extent.size(axis):
            raise UsageError(
                f"{axis}={extent.size(axis)} cannot shrink by {count}: nothing would be left. "
                f"End the mesh: {advice().stop}"
            )
    left = set(dead)
    removed: dict[str, set[int]] = {}
    for axis, count in fewer.items():
        by_index = [sum(extent.point(rank)[axis] == index for rank in left) for index in range(extent.size(axis))]
        order = sorted(range(len(by_index)), key=lambda index: (by_index[index], index), reverse=True)
        removed[axis] = set(order[:count])
        left = {rank for rank in left if extent.point(rank)[axis] not in removed[axis]}
    if left:
        verb = "has" if len(left) == 1 else "have"
        raise UsageError(
            f"{name_ranks(left)} {verb} ended and would be left, with {format_sizes(fewer)} fewer. "
            f"Shrink by more, or repair first: {advice().heal}"
        )
    then = Extent.of({axis: size - fewer.get(axis, 0) for axis, size in extent.items()})
    kept = [
        point.rank for point in extent.points() if not any(point[axis] in indices for axis, indices in removed.items())
    ]
    return Plan(then, tuple(placement[rank] for rank in kept), {rank: at for at, rank in enumerate(kept)})


def without(extent: Extent, dead: Collection[int]) -> dict[str, int]:
    """The axis, and how many of its indices, to remove so that no dead rank and as many others as possible are left.

    Empty without dead ranks. Raises: UsageError where nothing would be left.
    """
    if not dead:
        return {}
    hit = {axis: len({extent.point(rank)[axis] for rank in dead}) for axis in extent.names}
    left = {axis: extent.size(axis) - count for axis, count in hit.items()}
    best = max(left, key=lambda axis: left[axis] / extent.size(axis))
    if not left[best]:
        raise UsageError(f"there is no part of the mesh without a rank that ended. Repair it: {advice().heal}")
    return {best: hit[best]}


def check_steps(extent: Extent, steps: Mapping[str, int], verb: str) -> None:
    """Refuse steps along no axis, or of less than one. Raises: UnknownAxisError, UsageError."""
    example = advice().change.format(verb=verb, sizes=f"{next(iter(extent.names), 'gpus')}=1")
    if not steps:
        raise UsageError(f"say along which axis, and by how much: {example}")
    for axis, count in steps.items():
        extent.axis(axis)
        if count < 1:
            raise UsageError(f"{verb} {axis}={count}: by at least 1, as in {example}")


def counts_hosts(extent: Extent, placement: Sequence[Hashable], axis: str, host_axes: Collection[str]) -> bool:
    """Whether each index of ``axis`` is on hosts of its own."""
    if extent.size(axis) == 1:
        return axis in host_axes
    hosts: list[set[Hashable]] = [set() for _ in range(extent.size(axis))]
    for point in extent.points():
        hosts[point[axis]].add(placement[point.rank])
    return sum(map(len, hosts)) == len(set().union(*hosts))


def describe_moves(moved: Mapping[int, int]) -> str:
    """``ranks 2-3 are ranks 3-4 now``; nothing where all have kept their numbers."""
    changed = {before: after for before, after in moved.items() if before != after}
    if not changed:
        return ""
    verb = "is" if len(changed) == 1 else "are"
    noun = "rank" if len(changed) == 1 else "ranks"
    return f"{name_ranks(changed)} {verb} {noun} {format_ranks(changed.values())} now"
