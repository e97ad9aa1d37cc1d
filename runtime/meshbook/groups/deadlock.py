"""Which ranks wait for something that can never come. Pure: from what the ranks tell of their groups to a proof.

    rank 1 has ended the cell and issued 40 operations of group "0"     it will not issue a 41st
    rank 0 waits in operation 41 of "0"                                 so it is never served, and issues nothing more
    rank 2 waits in operation 7 of "tp", of which rank 0 issued 6       so it is never served either

The last two steps are repeated until nothing new follows. Snapshots need not be of one moment: that a rank has ended is
known before it is asked, so its counters are final, and a rank that is stuck stays so with the counters it had. A rank
that did not answer proves nothing, neither does one whose groups are of another epoch.

All this is told thread by thread. A rank that has ended a cell may have an actor, or a thread of the user's, at work in
the same group, which may still do its part; and what such a thread waits in is no matter of the cell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from meshbook.groups.progress import ANY_PEER, CellCounts, Collectives, GroupProgress, Waiting
from meshbook.groups.wait_graph import WaitGraph, place_of

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
    """Return the ranks whose main threads can never be served, with what each waits in.

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
    """What is known so far: who is silent for ever, and how far each was."""

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
        """Find threads that are stuck by what is known; whether there were any."""
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
    """Else it must be found again, equally far, by another look: who uses it may have begun just now."""
    counts: tuple[object, ...] = ()
    """How far each member was."""


def differing_groups(snapshots: Mapping[int, Collectives], *, of_cells: bool = True) -> list[Odd]:
    """The groups that are of no use any more, of ranks that have all come to rest.

    Groups with a member that did not answer, or that runs another call, are left out: nothing can be said of them.
    Where actors or threads are at work in a group, what calls on the main threads have begun is compared: the rest is
    theirs.

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
    """How many messages went, by receiver and sender."""
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
