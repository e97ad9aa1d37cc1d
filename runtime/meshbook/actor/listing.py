"""The actors of a mesh, as its ranks tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshbook.formatting import format_some_ranks

ROWS = 12
"""Rows for one mesh of actors; its other ranks are counted."""
RANKS_CHARS = 24


class ActorState(NamedTuple):
    """The state of one actor."""

    rank: int
    mailbox: int
    """The same for all that were spawned together, and never used twice."""
    name: str
    class_name: str
    queued: int
    """How many messages wait for it."""
    doing: tuple[str, ...]
    """The endpoints that run; several only of an async class."""
    busy_s: float
    where: str
    """The line that it is at: ``cell 7, line 3``."""
    broken: bool
    """Whether the actor's constructor has failed."""


def actor_table(states: Iterable[ActorState]) -> str:
    """A row for each mesh of actors and what its members do; those that do the same share a row."""
    rows: list[tuple[str, str, str, str]] = []
    meshes: dict[int, list[ActorState]] = {}
    for state in states:
        meshes.setdefault(state.mailbox, []).append(state)
    for members in meshes.values():
        name, class_name = members[0].name, members[0].class_name
        groups: dict[object, list[ActorState]] = {}
        for one in members:
            groups.setdefault((one.broken, one.doing, one.where, one.queued), []).append(one)
        for group in list(groups.values())[:ROWS]:
            rows.append((name, class_name, format_some_ranks((one.rank for one in group), RANKS_CHARS), _doing(group)))
            name = class_name = ""
        if hidden := sum(len(group) for group in list(groups.values())[ROWS:]):
            rows.append(("", "", "", f"and {hidden} more ranks"))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def _doing(group: list[ActorState]) -> str:
    """``step for 3.2 s (train.py:41), 5 wait``"""
    first = group[0]
    if first.broken:
        return "could not be made: its next call tells why"
    parts = ["idle"]
    if first.doing:
        longest = max(one.busy_s for one in group)
        parts = [f"{', '.join(first.doing)} for {longest:.1f} s" + (f" ({first.where})" if first.where else "")]
    if first.queued:
        parts.append(f"{first.queued} wait{'s' if first.queued == 1 else ''}")
    return ", ".join(parts)
