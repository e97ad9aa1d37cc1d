"""The proof that ranks wait for something that can never come, from their reports of groups. Pure.

`WaitGraph` says whom a rank waits for at one moment; `meshbook.groups.stragglers` asks it too.

    rank 0 waits in operation 41 of "0"         for the members that have issued fewer, or were aborted in it
    rank 1 waits in recv from rank 3            for rank 3, unless that has sent as many
    rank 2 waits in recv from anybody           for all others, unless they have sent more than it has taken

`find_deadlocked` proves which of these waits are in vain:

    rank 1 has ended the cell and issued 40 operations of group "0"     it will not issue a 41st
    rank 0 waits in operation 41 of "0"                                 so it is never served, and issues nothing more
    rank 2 waits in operation 7 of "tp", of which rank 0 issued 6       so it is never served either

The last two steps are repeated until nothing new follows. Snapshots need not be of one moment: that a rank has ended is
known before it is asked, so its counters are final, and a rank that is stuck stays so with the counters it had. A rank
that did not answer proves nothing, neither does one whose groups are of another epoch.

All this is told thread by thread. A rank that has ended a cell may have an actor, or a thread of the user's, at work in
the same group, which may still do its part; and the operation that such a thread waits in does not concern the cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from meshbook.groups.progress import ANY_PEER, CellCounts, Collectives, GroupProgress, Waiting

DELIVERED_S = 0.25
"""The time in which a message has arrived; only asked for where receives from anybody blur the counts."""

ALL_SENT_S = 2.0
"""The time in which the last messages of a member whose group was aborted have arrived: it sends no more."""


class WaitGraph:
    """The answers of ranks about their groups, by rank and name of group, and whom these make a rank wait for."""

    def __init__(self, snapshots: Mapping[int, Collectives]) -> None:
        self._groups = {rank: {group.name: group for group in told.groups} for rank, told in snapshots.items()}
        self._missing: dict[tuple[str, int, bool], tuple[int, ...]] = {}
        """Members that have not begun a collective, for whom all others wait in it; by its group and number, and
        whether the parts of aborted members have arrived."""

    def group(self, rank: int, name: str) -> GroupProgress | None:
        """Return what the rank told of the group; None where it has not made the group, as far as is known."""
        return self._groups.get(rank, {}).get(name)

    def issued(self, rank: int, name: str) -> int:
        """Return the number of collectives of the group that the rank has begun."""
        group = self.group(rank, name)
        return group.issued if group is not None else 0

    def awaited(self, rank: int, waiting: Waiting) -> tuple[int, ...]:
        """The members whose part is missing in the operation that a rank waits in.

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


_MAIN = 0
_NOTHING = CellCounts()


class Stuck(NamedTuple):
    """A rank that is never served."""

    waiting: Waiting
    absent: tuple[int, ...]
    """The ranks that will never do their part."""


def find_deadlocked(
    snapshots: Mapping[int, Collectives], ended: Collection[int], dead: Collection[int] = (), mailbox: int = 0
) -> dict[int, Stuck]:
    """Return the ranks whose main threads can never be served, each with the operation that it waits in.

    snapshots: of the ranks that answered, each taken after ``ended`` was known.
    ended: ranks whose main threads have ended the call in question, or will issue nothing more for another reason.
    dead: ranks whose processes are gone; nothing is known of how far they were.
    mailbox: not the main threads, but the actors of this mailbox, and threads that nobody else owns.
    """
    epochs = {snapshot.epoch for snapshot in snapshots.values()} - {-1}
    if len(epochs) != 1:
        return {}
    state = _State(snapshots, set(ended) & snapshots.keys(), set(dead), mailbox)
    while state.find_more():
        pass
    return state.stuck


class _State:
    """The proof so far: which threads are silent for ever, and how far each rank was."""

    def __init__(self, snapshots: Mapping[int, Collectives], ended: set[int], dead: set[int], mailbox: int) -> None:
        self.stuck: dict[int, Stuck] = {}
        self._snapshots, self._dead, self._mailbox = snapshots, dead, mailbox
        self._gone = dead | {rank for rank, told in snapshots.items() if told.aborted}
        """Ranks none of whose threads begins an operation any more."""
        self._over = {(rank, _MAIN) for rank in ended}
        """Threads that begin none any more: they have ended, or are stuck."""
        self._graph = WaitGraph({rank: told for rank, told in snapshots.items() if rank not in dead})
        self._users = _mailboxes_by_group(snapshots)
        self._absent_of: dict[tuple[str, int], tuple[int, ...]] = {}
        """Members that will never enter a collective, as far as is known in this pass; by its group and number."""

    def find_more(self) -> bool:
        """Find threads that are stuck, as far as is known. Returns: whether there were any."""
        found = []
        self._absent_of.clear()
        for rank, told in self._snapshots.items():
            for thread in {waiting.thread for waiting in told.waiting if self._is_meant(told, waiting.thread)}:
                if not told.aborted and (rank, thread) not in self._over:
                    stuck = self._look_at(rank, [each for each in told.waiting if each.thread == thread])
                    found += [(rank, thread, stuck)] if stuck is not None else []
        for rank, thread, stuck in found:
            self._over.add((rank, thread))
            self.stuck.setdefault(rank, stuck)
        return bool(found)

    def _is_meant(self, told: Collectives, thread: int) -> bool:
        if not self._mailbox or thread == _MAIN:
            return not self._mailbox and thread == _MAIN
        return told.handling.get(thread, self._mailbox) == self._mailbox

    def _look_at(self, rank: int, waits: list[Waiting]) -> Stuck | None:
        """The proof that a thread is stuck. All that it waits in must be hopeless, else it may go on."""
        proofs = []
        for waiting in waits:
            absent = self._absent(rank, waiting)
            if not absent:
                return None
            proofs.append(Stuck(waiting, absent))
        return proofs[0]

    def _absent(self, rank: int, waiting: Waiting) -> tuple[int, ...]:
        awaited = self._graph.awaited(rank, waiting)
        key = waiting.group, waiting.number
        if waiting.peer is None and awaited and key in self._absent_of:
            return self._absent_of[key]
        absent = tuple(member for member in awaited if self._is_over(member, waiting.group))
        if waiting.peer is None and awaited:
            self._absent_of[key] = absent
        return absent if waiting.peer != ANY_PEER or absent == awaited else ()

    def _is_over(self, rank: int, name: str) -> bool:
        """Whether no thread of the rank begins an operation of the group any more."""
        if rank in self._gone or rank not in self._snapshots:
            return rank in self._gone
        told, group = self._snapshots[rank], self._graph.group(rank, name)
        if group is not None and group.aborted:
            return True
        threads = {_MAIN, *(group.at_work if group is not None else ())}
        concerned = {self._mailbox, *self._users.get(name, ())}
        threads |= {thread for thread, mailbox in told.handling.items() if mailbox in concerned}
        return all((rank, thread) in self._over for thread in threads)


class Odd(NamedTuple):
    """A group that is of no use any more."""

    name: str
    """Empty where the default one is no more, and all that were made from it."""
    reason: str
    is_certain: bool
    """Whether one look is enough; else the group must be found again, equally far: a thread may just have begun."""
    counts: tuple[object, ...] = ()
    """The counts of operations of each member."""


def differing_groups(snapshots: Mapping[int, Collectives], *, of_cells: bool = True) -> list[Odd]:
    """The groups that are of no use any more, of ranks that have all come to rest.

    Groups with a member that did not answer, or that runs another call, are left out: nothing can be said of them.
    Where actors or threads are at work in a group, only operations of calls on the main threads are compared.

    of_cells: such a call has failed.
    """
    found = [
        Odd("", f"rank {rank} destroyed the process group", True)
        for rank, told in sorted(snapshots.items())
        if told.destroyed and not told.call
    ]
    names = {group.name: group.members for told in snapshots.values() for group in told.groups}
    graph, in_use = WaitGraph(snapshots), _in_use(snapshots)
    for name, members in sorted(names.items()):
        groups = {member: graph.group(member, name) for member in members if member in snapshots}
        why = next((f"rank {rank}: {group.broken}" for rank, group in groups.items() if group and group.broken), "")
        if why:
            found.append(Odd(name, why, True))
        elif all(member in snapshots and not snapshots[member].call for member in members):
            cells = {rank: group.by_cells if group else _NOTHING for rank, group in groups.items()}
            cells_differ = of_cells and _differ(cells)
            at_rest = name not in in_use
            if at_rest and not _differ(groups):
                continue
            if cells_differ or at_rest:
                counts = tuple((group.issued, group.sent, group.received) for group in groups.values() if group)
                found.append(Odd(name, f"the members of group {name} are not equally far", cells_differ, counts))
    return found


def is_in_use(snapshots: Mapping[int, Collectives], name: str) -> bool:
    """Whether actors, or threads other than the main one, may be at work in a group, on any of its members."""
    return name in _in_use(snapshots)


def are_in_use(snapshots: Mapping[int, Collectives]) -> bool:
    """Whether actors, or threads other than the main one, may be at work in any group."""
    names = {group.name for told in snapshots.values() for group in told.groups}
    return not names.isdisjoint(_in_use(snapshots))


def _in_use(snapshots: Mapping[int, Collectives]) -> set[str]:
    """The groups in which actors, or threads other than the main one, may be at work, on any of their members."""
    handling = {mailbox for told in snapshots.values() for mailbox in told.handling.values()}
    found = {name for name, mailboxes in _mailboxes_by_group(snapshots).items() if not handling.isdisjoint(mailboxes)}
    for told in snapshots.values():
        found.update(waiting.group for waiting in told.waiting)
        found.update(group.name for group in told.groups if group.at_work)
    return found


def only_where_shared(
    snapshots: Mapping[int, Collectives], names: Collection[str], mailboxes: Collection[int] = ()
) -> Collection[str]:
    """The ``names`` of groups that are of no use, if others go on meanwhile; else none, which stands for all groups.

    mailboxes: of actors whose call has failed; none for calls to main threads.
    """
    if "" in names:
        return ()
    for told in snapshots.values():
        ours = {thread for thread, mailbox in told.handling.items() if mailbox in mailboxes}
        at_work = {thread for group in told.groups for thread in group.at_work}
        at_work |= {waiting.thread for waiting in told.waiting} | told.handling.keys()
        if (mailboxes and told.call) or at_work - ours - {_MAIN}:
            return names
    return ()


def mailboxes_of(snapshots: Mapping[int, Collectives], name: str) -> set[int]:
    """The mailboxes of the actors that use a group."""
    return _mailboxes_by_group(snapshots).get(name, set())


def _mailboxes_by_group(snapshots: Mapping[int, Collectives]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for told in snapshots.values():
        for group in told.groups:
            if group.mailboxes:
                found.setdefault(group.name, set()).update(group.mailboxes)
    return found


def _differ(groups: Mapping[int, GroupProgress | CellCounts | None]) -> bool:
    if len({group.issued if group else 0 for group in groups.values()}) > 1:
        return True
    sent: dict[int, dict[int, int]] = {}
    """The number of messages that went, by receiver and sender."""
    for sender, group in groups.items():
        for receiver, count in (group.sent if group else {}).items():
            if count:
                sent.setdefault(receiver, {})[sender] = count
    for receiver, group in groups.items():
        received = {sender: count for sender, count in (group.received if group else {}).items() if count}
        came = sent.get(receiver, {})
        if sum(came.values()) != sum(received.values()) if ANY_PEER in received else came != received:
            return True
    return False


def where_stuck(stuck: Iterable[tuple[int, Stuck]]) -> dict[int, str]:
    """Rank to ``all_reduce (cell 7, line 5)``."""
    return {rank: place_of(each.waiting) for rank, each in stuck}
