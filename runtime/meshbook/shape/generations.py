"""Ranks get other numbers when a mesh grows or shrinks; who knew a process by its rank finds it by the moves since.

generation 0   rank 0  1  2  3
shrinks             |  x  |  |      moves[0] = (0, GONE, 1, 2)
generation 1   rank 0     1  2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from meshbook.shape.extent import Extent
from meshbook.shape.members import Members, arrange

Moves: TypeAlias = tuple[tuple[int, ...], ...]
"""Of each generation but the last: what its ranks are in the next one. The number of the last is their length."""

GONE = -1

AS_NOW = -1
"""In the place of a generation: ranks are meant as they are."""


def step_of(moved: Mapping[int, int], size: int) -> tuple[int, ...]:
    """The moves of a mesh of ``size`` ranks. moved: rank before to rank after, of those that stay."""
    return tuple(moved.get(rank, GONE) for rank in range(size))


def ranks_now(moves: Moves, generation: int, ranks: Iterable[int]) -> list[int]:
    """What ``ranks`` of a generation are now; GONE for those that have left."""
    found = list(ranks)
    for step in moves[generation:] if generation != AS_NOW else ():
        found = [step[rank] if 0 <= rank < len(step) else GONE for rank in found]
    return found


def arranged_now(members: Members, now: Sequence[int]) -> Members:
    """The same processes in the same arrangement, under the ranks that they have ``now``."""
    return members if list(members.ranks()) == list(now) else arrange(Extent.of(members.sizes), now)
