"""The waits of ranks for each other in their process groups: the proof that one is in vain, and a look. Pure.

`WaitGraph` says whom a rank waits for at one moment:

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

`find_stragglers` names the ranks that hold the others up: from each rank that waits it follows whom it waits for, to
those that wait in nothing. Where there are none, all wait for each other: in different operations under the same
number, or in a circle. This is a look at one moment, and no proof that it will stay so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from meshbook.formatting import group_ranks, name_ranks
from meshbook.groups.agreements import find_disagreements
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
    everybody = {member for members in names.values() for member in members}
    made = {rank: dict(told.made) for rank, told in snapshots.items()}
    for makers in {members for told in made.values() for members in told}:
        ranks = sorted(makers or everybody)
        if all(rank in snapshots and not snapshots[rank].call for rank in ranks):
            numbers = tuple(made[rank].get(makers, 0) for rank in ranks)
            if len(set(numbers)) > 1:
                found.append(Odd("", f"{name_ranks(ranks)} have made different numbers of groups", False, numbers))
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


WRAP = ",\n  "
SHOWN = 3
"""Places, and odd ranks, that one sentence tells of."""


class RankProgress(NamedTuple):
    """The progress of one rank at one moment."""

    doing: str
    """The end of a sentence: ``is in time.sleep (train.py:41)``, ``does not answer: native code holds the GIL``."""
    collectives: Collectives | None
    """The answer of the rank; None where it did not answer."""


class Verdict(NamedTuple):
    """The ranks that wait, and the ranks that they wait for."""

    odd: tuple[int, ...]
    """The ranks that hold the others up; where all wait for each other, the fewer ones."""
    waiting: tuple[int, ...]
    """The others that wait."""
    since_s: float
    """The time that all of these have waited by now."""
    circular: bool
    """Whether they wait for each other: none of them can go on."""
    text: str


def find_stragglers(poll: Mapping[int, RankProgress]) -> Verdict | None:
    """The verdict, where some rank waits for another."""
    return _Moment(poll).judge()


class _Moment:
    def __init__(self, poll: Mapping[int, RankProgress]) -> None:
        self._poll = poll
        self._waits: dict[int, Waiting] = {
            rank: waits[0]
            for rank, look in poll.items()
            if (told := look.collectives) is not None and not told.aborted and (waits := told.waiting or told.under_way)
        }
        self._told = {rank: look.collectives for rank, look in poll.items() if look.collectives is not None}
        self._graph = WaitGraph(self._told)
        self._blockers: dict[int, set[int]] = {}
        """The ranks that each rank waits for."""
        self._many_groups = len({waiting.group for waiting in self._waits.values()}) > 1

    def judge(self) -> Verdict | None:
        if (mismatch := self._find_mismatch() or self._find_disagreement()) is not None:
            return mismatch
        graph, waits = self._graph, self._waits
        blockers = {rank: {*graph.awaited(rank, each)} & self._poll.keys() for rank, each in waits.items()}
        self._blockers = blockers
        odd: set[int] = set()
        held: set[int] = set()
        for rank in self._waits:
            if ends := _ends_of(rank, blockers):
                odd |= ends
                held.add(rank)
        if odd:
            text = f"{self._describe_waits(held)};\n  {self._describe_odd(odd, held)}"
            return Verdict(tuple(sorted(odd)), tuple(sorted(held)), self._since(held), False, text)
        held = {rank for rank, awaited in blockers.items() if awaited}
        if not held or not all(look.collectives.waiting for r in held if (look := self._poll[r]).collectives):
            return None  # who has operations under way may go on without them
        fewest = min(self._by_place(held).values(), key=len)
        text = f"{name_ranks(held)} wait for each other:\n  {self._describe_waits(held, WRAP)}"
        return Verdict(tuple(fewest), tuple(sorted(held - set(fewest))), self._since(held), True, text)

    # ---- operations that do not match -----------------------------------------------------------------------------

    def _find_mismatch(self) -> Verdict | None:
        """Different operations under the same number of a group."""
        waits = [(rank, waiting) for rank, waiting in self._waits.items() if waiting.peer is None]
        entered = group_ranks((rank, (waiting.group, waiting.number)) for rank, waiting in waits)
        differing = [key for key, ranks in entered.items() if len({self._waits[rank].operation for rank in ranks}) > 1]
        if not differing:
            return None
        group, number = max(differing, key=lambda key: len(entered[key]))
        operations = group_ranks((rank, self._waits[rank].operation) for rank in entered[group, number])
        *few, most = sorted(operations.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        odd = {rank for ranks in few for rank in ranks}
        of_group = f' of group "{group}"' if self._many_groups else ""
        text = (
            f"{self._are_in(odd)} as operation {number}{of_group}, where {self._are_in(most)}: "
            "they wait for each other"
        )  # fmt: skip
        return Verdict(tuple(sorted(odd)), tuple(sorted(most)), self._since(odd | set(most)), True, text)

    def _find_disagreement(self) -> Verdict | None:
        """The same operation under the same number, of another shape, say; where somebody waits for it, or later."""
        for found in find_disagreements(self._told):
            if held := {rank for rank in found.ranks if rank in self._waits}:
                return Verdict(tuple(sorted(held)), found.ranks, self._since(held), True, found.text)
        return None

    # ---- words --------------------------------------------------------------------------------------------------

    def _are_in(self, ranks: Iterable[int]) -> str:
        """``rank 3 is in barrier (cell 7, line 9)``"""
        return " and ".join(
            f"{name_ranks(each)} {'is' if len(each) == 1 else 'are'} in {place}"
            for place, each in list(self._by_place(ranks).items())[:SHOWN]
        )

    def _by_place(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        places = group_ranks((rank, place_of(self._waits[rank])) for rank in sorted(ranks))
        return dict(sorted(places.items(), key=lambda item: -len(item[1])))

    def _describe_waits(self, ranks: Iterable[int], comma: str = ", ") -> str:
        """``ranks 0-2 wait in all_reduce (cell 7, line 5), operation 41``"""
        parts = []
        by_place = self._by_place(ranks)
        for place, each in list(by_place.items())[:SHOWN]:
            numbers = {self._waits[rank].number for rank in each}
            what = "" if self._waits[each[0]].peer is not None else f", operation {'/'.join(map(str, sorted(numbers)))}"
            group = f' of group "{self._waits[each[0]].group}"' if self._many_groups and what else ""
            parts.append(f"{name_ranks(each)} wait{'s' if len(each) == 1 else ''} in {place}{what}{group}")
        more = len(by_place) - SHOWN
        return comma.join(parts) + (f"{comma}others in {more} more place{'s' if more > 1 else ''}" if more > 0 else "")

    def _describe_odd(self, odd: set[int], held: set[int]) -> str:
        """``rank 3 has issued 40 and is in time.sleep (train.py:41)``"""
        texts = group_ranks((rank, f"{self._told_of(rank, held)}{self._poll[rank].doing}") for rank in sorted(odd))
        shown = [f"{name_ranks(ranks)} {text}" for text, ranks in list(texts.items())[:SHOWN]]
        rest = [rank for ranks in list(texts.values())[SHOWN:] for rank in ranks]
        return WRAP.join(shown + ([f"{name_ranks(rest)} do something else"] if rest else []))

    def _told_of(self, rank: int, held: set[int]) -> str:
        """Return how far the rank is in the group in which most wait for it."""
        numbers: dict[str, int] = {}
        for each in held:
            waiting = self._waits[each]
            if waiting.peer is None and rank in self._blockers[each]:
                numbers[waiting.group] = numbers.get(waiting.group, 0) + 1
        if not numbers or rank not in self._told:
            return ""
        return f"has issued {self._graph.issued(rank, max(numbers, key=lambda name: numbers[name]))} and "

    def _since(self, ranks: Iterable[int]) -> float:
        return min(self._waits[rank].since_s for rank in ranks)


def _ends_of(rank: int, blockers: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that ``rank`` waits for in the end: they wait in nothing themselves."""
    ends: set[int] = set()
    seen, left = {rank}, list(blockers[rank])
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in blockers:
            left += blockers[each] - seen
        else:
            ends.add(each)
    return ends
