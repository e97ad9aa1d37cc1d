"""The facts of a mesh of actors that all its views in one process share; and a table of the actors of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from meshbook.actor.classes import ActorClass
from meshbook.actor.errors import (
    ActorLostError,
    ActorsLeftError,
    ActorStoppedError,
    MessageTooLargeError,
    ProcsStoppedError,
    UnhandledFault,
)
from meshbook.actor.router import Address, Answers, is_rank, router_for
from meshbook.actor.supervision import MeshFailure, join_failures
from meshbook.calls.call import CallRequest, OnReply
from meshbook.concurrency.future import Future
from meshbook.errors import MeshDetachedError, MeshStoppedError, RanksLeft, WorkerLost
from meshbook.formatting import Table, format_some_ranks
from meshbook.shape.members import Members, Region
from meshbook.values.pickling import Pickled, dumps, dumps_here

if TYPE_CHECKING:
    from meshbook.actor.ports import Port


@dataclass(eq=False)
class ActorIdentity:
    """The facts of a mesh of actors that all its views in one process share."""

    session: str
    mesh: int
    mesh_name: str
    mailbox: int
    """The same in each of their processes."""
    name: str
    cls: ActorClass
    members: Members
    """The ranks of all actors, as numbered in ``generation``."""
    generation: int
    owner: Port[MeshFailure] | None = None
    """The port that failures go to; known in the process that spawned the actors."""
    initialized: Future[None] | None = None
    """Known where they were spawned; elsewhere it is asked for."""
    stopped: str | None = None
    """The reason, once the actors were stopped from here."""
    called: bool = False
    """Whether anybody has called an endpoint here."""
    faults: deque[MeshFailure] = field(default_factory=deque)
    """The failures of messages without a caller, which the next use raises."""

    def __reduce__(self) -> tuple[object, ...]:
        if self.initialized is not None:  # else they are on their way to their processes
            router_for(self.session).await_procs(self.mesh)
        own = (self.session, self.mesh, self.mesh_name, self.mailbox, self.name, self.cls)
        return _find_group, (*own, self.members, self.generation)

    def find(self, members: Members, *, partly: bool = False) -> Address:
        """Return the address of the processes of ``members``. partly: without the ranks that left, unless all did.

        Raises: ActorsLeftError, ProcsStoppedError.
        """
        try:
            return router_for(self.session).find(self.mesh, members, self.generation, partly=partly)
        except RanksLeft as gone:
            raise ActorsLeftError(self.name, gone.left) from None
        except MeshDetachedError:
            raise
        except MeshStoppedError:
            raise ProcsStoppedError(self.mesh_name) from None

    def call(
        self,
        to: Address,
        endpoint: str,
        pickled: Pickled,
        *,
        reply: bool = True,
        fail_fast: bool = True,
        on_reply: OnReply | None = None,
    ) -> Answers:
        """Call an endpoint; without a reply a failure goes to the owner.

        Raises: ProcsStoppedError, ActorLostError where a process is known to have ended.
        """
        info = self.cls.endpoints.get(endpoint)
        request = CallRequest(
            endpoint, to.members, pickled, f"{self.name}.{endpoint}", self.mesh, self.mailbox, to.generation,
            fail_fast=fail_fast, beside=info is None or info.concurrent or info.wants_port, reply=reply,
            on_reply=on_reply,
        )  # fmt: skip
        try:
            return router_for(self.session).call(request)
        except MeshDetachedError:
            raise
        except MeshStoppedError:
            raise ProcsStoppedError(self.mesh_name) from None
        except WorkerLost as lost:
            raise ActorLostError.of_worker(lost, self.name) from None

    def pack(self, payload: object, *, what: str) -> Pickled:
        """Pickle a message to the actors; within a process, classes and functions go by reference.

        Raises: as `dumps`; MessageTooLargeError.
        """
        is_here = self.mesh == router_for(self.session).place.mesh == 0
        pickled = (dumps_here if is_here else dumps)(payload, what=what)
        if message_limit.size_bytes is not None:
            message_limit.check(pickled, what)
        return pickled

    def check_usable(self) -> None:
        """Check the actors before a call. Raises: ActorStoppedError; UnhandledFault, once for each."""
        if self.stopped is not None:
            raise ActorStoppedError(self.name, self.stopped)
        if self.faults:
            faults = []
            while self.faults:
                faults.append(self.faults.popleft())
            raise UnhandledFault("\n".join(fault.report() for fault in join_failures(faults)))


CalledView: TypeAlias = str | Members
"""The view that was called, from which an actor finds its place in it (`name_view`)."""


class MessageLimit:
    """The most bytes that the arguments of a call of this process may have; None: any size may be sent."""

    def __init__(self) -> None:
        self.size_bytes: int | None = None

    def set(self, size_bytes: int | None) -> None:
        self.size_bytes = size_bytes

    def check(self, pickled: Pickled, what: str) -> None:
        """Raises: MessageTooLargeError."""
        size = len(pickled.head) + sum(buffer.nbytes for buffer in pickled.buffers)
        if self.size_bytes is not None and size > self.size_bytes:
            raise MessageTooLargeError(what, size, self.size_bytes)


message_limit = MessageLimit()


_groups: dict[tuple[str, int], ActorIdentity] = {}
"""The groups that were spawned here, so that a reference which comes back has their present state."""


def _find_group(
    session: str, mesh: int, mesh_name: str, mailbox: int, name: str, cls: ActorClass, members: Members, generation: int
) -> ActorIdentity:
    return _groups.get((session, mailbox)) or ActorIdentity(
        session, mesh, mesh_name, mailbox, name, cls, members, generation
    )


def groups_on(session: str, mesh: int) -> list[ActorIdentity]:
    """Return the groups that were spawned here on a mesh of processes, and not stopped."""
    return [group for group in list(_groups.values()) if (group.session, group.mesh) == (session, mesh)]


def forget_session(session: str) -> None:
    """This process has left it."""
    for key in [key for key in _groups if key[0] == session]:
        del _groups[key]


def keep_group(group: ActorIdentity) -> None:
    """Keep a group that was spawned here."""
    _groups[group.session, group.mailbox] = group


def forget_group(group: ActorIdentity) -> None:
    """Forget a group that was stopped."""
    _groups.pop((group.session, group.mailbox), None)


def argument_names(args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments by the names that an error gives them."""
    return {**{f"argument {index}": value for index, value in enumerate(args, 1)}, **kwargs}


def name_view(members: Members) -> CalledView:
    """Return the view that is called, as its members need it to find their place: labels suffice on one host and from
    the notebook; a call from a rank is split by host on its way."""
    if isinstance(members, Region) and (max(members.layout.sizes, default=1) == 1 or not is_rank()):
        return ",".join(members.labels)
    return members


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
    """The number of messages that wait for it."""
    doing: tuple[str, ...]
    """The endpoints that run; several only of an async class."""
    busy_s: float
    where: str
    """The line that it is at: ``cell 7, line 3``."""
    broken: bool
    """Whether the actor's constructor has failed."""


def actor_table(states: Iterable[ActorState]) -> Table:
    """Return a table of the meshes of actors and their members' activity; members that do the same share a row."""
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
    return Table(("actors", "class", "ranks", "doing"), rows)


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
