"""Which ranks wait for something that can never come. Pure: from what the ranks tell of their groups to a proof.

    rank 1 has ended the cell and issued 40 operations of group "0"     it will not issue a 41st
    rank 0 waits in operation 41 of "0"                                 so it is never served, and issues nothing more
    rank 2 waits in operation 7 of "tp", of which rank 0 issued 6       so it is never served either

The last two steps are repeated until nothing new follows. Snapshots need not be of one moment: that a rank has ended is
known before it is asked, so its counters are final, and a rank that is stuck stays so with the counters it had. A rank
that did not answer proves nothing, neither does one whose groups are of another epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from meshbook.collectives import ANY_PEER, Collectives, GroupProgress, Waiting

DELIVERED_S = 0.25
"""What was sent before has arrived after so long; only asked for where receives from anybody blur the counts."""


class Stuck(NamedTuple):
    """A rank that is never served."""

    waiting: Waiting
    absent: tuple[int, ...]
    """The ranks that will never do their part."""


def find_stuck(
    snapshots: Mapping[int, Collectives], ended: Collection[int], dead: Collection[int] = ()
) -> dict[int, Stuck]:
    """Return the ranks that can never be served, with what each waits in.

    snapshots: of the ranks that answered, each taken after ``ended`` was known.
    ended: ranks that have ended the call in question, or will issue nothing more for another reason.
    dead: ranks whose processes are gone; nothing is known of how far they were.
    """
    epochs = {snapshot.epoch for snapshot in snapshots.values()} - {-1}
    if len(epochs) != 1:
        return {}
    state = _State(snapshots, set(ended) & snapshots.keys(), set(dead))
    candidates = [
        rank for rank, told in snapshots.items() if told.waiting and not told.aborted and rank not in state.silent
    ]
    while found := [(rank, stuck) for rank in candidates if (stuck := state.look_at(rank)) is not None]:
        state.stuck.update(found)
        candidates = [rank for rank in candidates if rank not in state.stuck]
    return state.stuck


class _State:
    """What is known so far: who is silent for ever, and how far each was."""

    def __init__(self, snapshots: Mapping[int, Collectives], ended: set[int], dead: set[int]) -> None:
        self.stuck: dict[int, Stuck] = {}
        self._snapshots, self._dead = snapshots, dead
        aborted = {rank for rank, told in snapshots.items() if told.aborted}
        self.silent = ended | dead | aborted
        """Ranks that begin no operation any more, for another reason than that they are stuck."""
        self._groups = {
            rank: {group.name: group for group in told.groups} for rank, told in snapshots.items() if rank not in dead
        }

    def look_at(self, rank: int) -> Stuck | None:
        """The proof that ``rank`` is stuck. All that its threads wait in must be hopeless, else one of them goes on."""
        proofs = []
        for waiting in self._snapshots[rank].waiting:
            absent = self._absent(rank, waiting)
            if not absent:
                return None
            proofs.append(Stuck(waiting, absent))
        return proofs[0]

    def _absent(self, rank: int, waiting: Waiting) -> tuple[int, ...]:
        group = self._groups[rank].get(waiting.group)
        if group is None:
            return ()
        others = [member for member in group.members if member != rank]
        if waiting.peer is None:
            return tuple(m for m in others if self._is_over(m) and self._issued(m, waiting.group) < waiting.number)
        if waiting.peer == ANY_PEER:
            return self._nobody_sends(rank, waiting, group, others)
        if not self._is_over(waiting.peer):
            return ()
        peers = self._group(waiting.peer, waiting.group)
        if waiting.operation.endswith("recv"):
            served = peers.sent.get(rank, 0) if peers else 0
        else:
            served = peers.received.get(rank, 0) + peers.received.get(ANY_PEER, 0) if peers else 0
        return (waiting.peer,) if served < waiting.number else ()

    def _nobody_sends(self, rank: int, waiting: Waiting, group: GroupProgress, others: list[int]) -> tuple[int, ...]:
        """For a receive from anybody: all others, if none of them can still send and all that they sent was taken."""
        if not all(self._is_over(member) for member in others):
            return ()
        told = [self._group(member, waiting.group) for member in others]
        sent = sum(each.sent.get(rank, 0) for each in told if each is not None)
        taken_too = sent < sum(group.received.values()) and waiting.since_s > DELIVERED_S
        return tuple(others) if sent < waiting.number or taken_too else ()

    def _is_over(self, rank: int) -> bool:
        return rank in self.silent or rank in self.stuck

    def _group(self, rank: int, name: str) -> GroupProgress | None:
        """None where it is known that the rank has not made the group, or is dead."""
        return self._groups.get(rank, {}).get(name)

    def _issued(self, rank: int, name: str) -> int:
        group = self._group(rank, name)
        return group.issued if group is not None else 0


def differing_groups(snapshots: Mapping[int, Collectives]) -> list[str]:
    """The groups that are of no use any more, of ranks that have all come to rest: why, one line each.

    Groups with a member that did not answer, or that runs another call, are left out: nothing can be said of them.
    """
    reasons = []
    for rank, told in sorted(snapshots.items()):
        if told.abandoned:
            reasons.append(f"rank {rank} gave up an operation")
    names = {group.name: group.members for told in snapshots.values() for group in told.groups}
    for name, members in sorted(names.items()):
        if any(member not in snapshots or snapshots[member].call for member in members):
            continue
        groups = {
            member: next((group for group in snapshots[member].groups if group.name == name), None)
            for member in members
        }
        if _differ(groups):
            reasons.append(f"the members of group {name} are not equally far")
    return reasons


def _differ(groups: Mapping[int, GroupProgress | None]) -> bool:
    if len({group.issued if group else 0 for group in groups.values()}) > 1:
        return True
    for receiver, group in groups.items():
        received = group.received if group else {}
        if received.get(ANY_PEER, 0):
            if sum(_sent(other, receiver) for other in groups.values()) != sum(received.values()):
                return True
        elif any(_sent(other, receiver) != received.get(sender, 0) for sender, other in groups.items()):
            return True
    return False


def _sent(group: GroupProgress | None, to: int) -> int:
    return group.sent.get(to, 0) if group else 0


def where_stuck(stuck: Iterable[tuple[int, Stuck]]) -> dict[int, str]:
    """Rank to ``all_reduce (cell 7, line 5)``."""
    return {rank: place_of(each.waiting) for rank, each in stuck}


def place_of(waiting: Waiting) -> str:
    """``all_reduce (cell 7, line 5)``, ``recv from rank 3 (cell 7, line 5)``."""
    peer = ""
    if waiting.peer is not None:
        whom = "any rank" if waiting.peer == ANY_PEER else f"rank {waiting.peer}"
        peer = f" {'to' if waiting.operation.endswith('send') else 'from'} {whom}"
    place = f" ({waiting.place})" if waiting.place else ""
    return f"{waiting.operation}{peer}{place}"
