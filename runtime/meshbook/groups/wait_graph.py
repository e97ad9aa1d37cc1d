"""Who waits for whom: from what ranks tell of their groups at one moment to the ranks whose part is missing. Pure.

    rank 0 waits in operation 41 of "0"         for the members that have issued fewer, or were aborted in it
    rank 1 waits in recv from rank 3            for rank 3, unless that has sent as many
    rank 2 waits in recv from anybody           for all others, unless they have sent more than it has taken

`meshbook.groups.deadlock` proves with it who waits in vain, `meshbook.groups.stragglers` tells who holds the others up.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshbook.groups.progress import ANY_PEER, Collectives, GroupProgress, Waiting

DELIVERED_S = 0.25
"""What was sent before has arrived after so long; only asked for where receives from anybody blur the counts."""

ALL_SENT_S = 2.0
"""Of a member whose group was aborted nothing more comes: what it had sent before has arrived after so long."""


class WaitGraph:
    """What ranks have told of their groups, by rank and name of group."""

    def __init__(self, snapshots: Mapping[int, Collectives]) -> None:
        self._groups = {rank: {group.name: group for group in told.groups} for rank, told in snapshots.items()}
        self._missing: dict[tuple[str, int, bool], tuple[int, ...]] = {}
        """Members that have not begun a collective, for whom all others wait in it; by its group and number, and
        whether what aborted members have sent for it has arrived."""

    def group(self, rank: int, name: str) -> GroupProgress | None:
        """None where the rank has not made the group, as far as is known."""
        return self._groups.get(rank, {}).get(name)

    def issued(self, rank: int, name: str) -> int:
        """How many collectives of the group the rank has begun."""
        group = self.group(rank, name)
        return group.issued if group is not None else 0

    def awaited(self, rank: int, waiting: Waiting) -> tuple[int, ...]:
        """The members whose part is missing in what a rank waits in.

        A receive from anybody waits for any one of them, everything else for all of them.
        """
        group = self.group(rank, waiting.group)
        if group is None or group.aborted:  # it comes back by itself
            return ()
        is_late = waiting.since_s > ALL_SENT_S
        if waiting.peer is None:
            missing = self._without(group, waiting.number, is_late)
            has_issued = group.issued >= waiting.number
            return missing if has_issued else tuple(member for member in missing if member != rank)
        if waiting.peer == ANY_PEER:
            others = tuple(member for member in group.members if member != rank)
            told = [self.group(member, waiting.group) for member in others]
            sent = sum(each.sent.get(rank, 0) for each in told if each is not None)
            taken_too = sent < sum(group.received.values()) and waiting.since_s > DELIVERED_S
            return others if sent < waiting.number or taken_too else ()
        peers = self.group(waiting.peer, waiting.group)
        if peers is None:
            served = 0
        elif waiting.operation.endswith("recv"):
            served = peers.sent.get(rank, 0)
        else:
            served = peers.received.get(rank, 0) + peers.received.get(ANY_PEER, 0)
        is_served = served > waiting.number or (served == waiting.number and not _gave_up(peers))
        return () if is_served and not (is_late and peers is not None and peers.aborted) else (waiting.peer,)

    def _without(self, group: GroupProgress, number: int, is_late: bool) -> tuple[int, ...]:
        """The members that have not begun a collective, or have given it up."""
        key = group.name, number, is_late
        if (missing := self._missing.get(key)) is None:
            missing = tuple(member for member in group.members if not self._does_its_part(member, *key))
            self._missing[key] = missing
        return missing

    def _does_its_part(self, rank: int, name: str, number: int, is_late: bool) -> bool:
        group = self.group(rank, name)
        if group is None or (is_late and group.aborted):
            return False
        return group.issued > number or (group.issued == number and not _gave_up(group))


def _gave_up(group: GroupProgress | None) -> bool:
    """Whether a rank left the last operation that it has begun, as its group was aborted: nobody is served by that."""
    return group is not None and bool(group.aborted and group.broken)


def place_of(waiting: Waiting) -> str:
    """``all_reduce (cell 7, line 5)``, ``recv from rank 3 (cell 7, line 5)``."""
    peer = ""
    if waiting.peer is not None:
        whom = "any rank" if waiting.peer == ANY_PEER else f"rank {waiting.peer}"
        peer = f" {'to' if waiting.operation.endswith('send') else 'from'} {whom}"
    place = f" ({waiting.place})" if waiting.place else ""
    return f"{waiting.operation}{peer}{place}"
