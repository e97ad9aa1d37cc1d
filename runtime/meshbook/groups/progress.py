"""The answer of a rank about its process groups: how far each is, its waits, and its operations while profiled. Pure.

Operations of a group are numbered from 1 on every member, so numbers of different ranks can be compared: a rank that
waits in operation 41 of a group can only be served by members that issue their 41st.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

ANY_PEER = -1
"""The peer of a receive that takes from anybody."""


class Parts(NamedTuple):
    """The elements that an all_to_all gives to each member of its group, and takes from each."""

    given: tuple[int, ...]
    taken: tuple[int, ...]


class Entered(NamedTuple):
    """A collective, or a send or receive, that a rank has begun."""

    number: int
    code: int
    """Equal on all members that have begun the same (`meshbook.groups.operands`)."""
    operation: str
    """The name in ``torch.distributed``."""
    values: tuple[str, ...]
    """Words for all that must be equal on all members; as many for each operation of a name: ``(5,)``, ``float32``."""
    place: str
    """``cell 7, line 5``."""
    parts: Parts | None = None
    """The parts of an all_to_all; None for other operations."""


class Messages(NamedTuple):
    """The messages from one member of a group to another, as one of the two tells (`meshbook.groups.operands`)."""

    sender: int
    receiver: int
    """Base ranks."""
    number: int
    """The number of the last one; equal where both have begun as many, with the same tags."""
    digest: int
    recent: tuple[Entered, ...]


class CellCounts(NamedTuple):
    """Operations that calls on the main thread have begun, as `GroupProgress` counts them."""

    issued: int = 0
    sent: Mapping[int, int] = {}
    received: Mapping[int, int] = {}


class GroupProgress(NamedTuple):
    """The progress of one group on one rank. Counters begin at 0 in each epoch."""

    name: str
    """torch's name of the group, equal on all members."""
    members: tuple[int, ...]
    """Base ranks of the mesh."""
    issued: int
    """Collectives that this rank has begun, up to the first that failed: it does no more for that one."""
    sent: Mapping[int, int]
    """Peer (base rank) to the number of sends that were begun, up to the first that failed."""
    received: Mapping[int, int]
    """Peer (base rank, or `ANY_PEER`) to the number of receives, likewise."""
    epoch: int = -1
    """The epoch in which it counts."""
    number: int = 0
    digest: int = 0
    """The digest of the first ``number`` collectives (`meshbook.groups.agreements`)."""
    recent: tuple[Entered, ...] = ()
    """The last of them, as many as were asked for."""
    by_cells: CellCounts = CellCounts()
    """The operations of calls on the main thread, failed ones too."""
    broken: str = ""
    """The reason why the group is of no use any more: ``all_reduce failed``, ``all_reduce was given up``."""
    at_work: tuple[int, ...] = ()
    """Threads that have used it and may go on to; neither the main one nor those of actors that are idle."""
    mailboxes: tuple[int, ...] = ()
    """The mailboxes of actors that have used it, idle ones too."""
    aborted: str = ""
    """The reason why it was aborted."""
    messages: tuple[Messages, ...] = ()
    """The messages to and from each peer, where recent operations were asked for."""

    def up_to(self, count: int) -> GroupProgress:
        """Return this without the collectives behind the first ``count``."""
        if self.number <= count:
            return self
        recent = tuple(each for each in self.recent if each.number <= count)
        return self._replace(issued=min(self.issued, count), number=0, digest=0, recent=recent)


class Waiting(NamedTuple):
    """An operation that a rank waits in."""

    group: str
    operation: str
    """The name in ``torch.distributed``: ``all_reduce``, ``send``."""
    number: int
    """The number among the group's collectives; for ``send`` and ``recv`` among those to or from that peer."""
    peer: int | None
    """Base rank, for ``send`` and ``recv``; None for collectives."""
    place: str
    """``cell 7, line 5``."""
    since_s: float
    thread: int = 0
    """The thread that waits; 0: the main one."""


class Made(NamedTuple):
    """The number of groups that a rank has made, by which the next one is named: all its members count alike."""

    members: tuple[int, ...]
    """The ranks that make such groups among themselves (``use_local_synchronization``); empty: all ranks together."""
    groups: int


class Collectives(NamedTuple):
    """The groups of one rank at one moment."""

    epoch: int
    """The epoch of the groups; -1 without groups."""
    call: int
    """The call that runs on the main thread; 0 when idle."""
    groups: tuple[GroupProgress, ...]
    waiting: tuple[Waiting, ...]
    aborted: str
    """The reason why the groups were aborted; empty while they work."""
    waited_s: float = 0.0
    """The time that the rank has waited in operations, in all."""
    under_way: tuple[Waiting, ...] = ()
    """The operations, of a rank that waits in none, that have not ended for a while: asynchronous or on a CUDA stream.
    Their place is where the main thread is now.
    """
    actors: int = 0
    """Actors that handle messages, or have some waiting."""
    destroyed: bool = False
    """A call has destroyed the default group, which belongs to the mesh."""
    handling: Mapping[int, int] = {}
    """The threads of those, with their mailboxes."""
    failed_call: int = 0
    """The last call that has failed on the main thread since the groups were formed; 0: none has."""
    failed_at: Mapping[str, int] = {}
    """The number of collectives of each group that the rank had begun by then; further ones are of later calls."""
    made: tuple[Made, ...] = ()

    def up_to_failure(self) -> Collectives:
        """Return the rank's operations as its call failed; threads beside the main one go on."""
        groups = tuple(group.up_to(self.failed_at.get(group.name, group.issued)) for group in self.groups)
        return self._replace(groups=groups, waiting=tuple(each for each in self.waiting if each.thread))


KEPT = 100_000
"""Operations, and waits, that one log remembers."""


class Operation(NamedTuple):
    """An operation. Members of a group give equal ones equal numbers."""

    epoch: int
    group: str
    name: str
    number: int
    is_collective: bool
    begun: float
    ended: float
    """The time at which its end was noticed: at the latest by a thread that waited for it."""


class Wait(NamedTuple):
    """A thread's wait for an operation."""

    thread: int
    what: str
    begun: float
    ended: float


class OperationLog:
    """The log of operations, which any thread may fill."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.waits: list[Wait] = []
        self.wall_minus_monotonic_s = time.time() - time.monotonic()

    def add_operation(self, operation: Operation) -> None:
        if len(self.operations) < KEPT:
            self.operations.append(operation)

    def add_wait(self, wait: Wait) -> None:
        if len(self.waits) < KEPT:
            self.waits.append(wait)
