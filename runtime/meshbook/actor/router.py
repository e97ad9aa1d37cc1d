"""The router of this process, by which references reach mailboxes, its own and those of others.

A reference (a mesh of actors, a port) that arrives in a process speaks through that process's router: in a worker the
mail lane of the worker, in the notebook the controller of the session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from meshbook.calls.call import CallRequest
from meshbook.calls.call_future import RequestFuture
from meshbook.calls.mailboxes import Mailboxes
from meshbook.concurrency import forks
from meshbook.concurrency.future import Future
from meshbook.errors import RanksLeft, UsageError
from meshbook.shape.members import AS_NOW, GONE, Members, MeshView, Moves, arranged_now, ranks_now
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.ports import Port
    from meshbook.actor.supervision import MeshFailure

TActor = TypeVar("TActor")

WATCH = "__watch__"
"""The endpoint of every actor that answers when it has ended; unless its process ends, which the caller is told."""

READY = "__ready__"
"""The endpoint of every actor that answers once it was made, or says why it could not be."""

STOP = "__stop__"
"""The endpoint of every actor that ends it."""

FIRST_OF_RANKS = 1 << 62
"""Mailboxes from here on were numbered by ranks."""

ACTORS = FIRST_OF_RANKS - 1
"""The mailbox of a process in which actors are spawned (`meshbook.worker.actors`)."""

ROOT = ACTORS - 1
"""The mailbox in which the controller's process is asked for processes (`meshbook.mesh.actor_router`)."""

SUPERVISOR = ROOT - 1
"""The mailbox for failures that no actor has handled: the same in each process that drives the session."""


class Place(NamedTuple):
    """A process: mesh 0, rank 0 is the controller's."""

    mesh: int
    rank: int
    generation: int = AS_NOW
    """The generation in which the mesh's rank has that number (`meshbook.shape.members`)."""


class Address(msgspec.Struct, frozen=True):
    """The processes that a reference means, as their mesh is now."""

    members: Members
    """The ranks as they are numbered now, arranged as they were."""
    generation: int
    """The generation of the mesh as it is now."""
    then: Members
    """The ranks as the reference has them."""


def find_now(moves: Moves, members: Members, generation: int, *, partly: bool = False) -> Address:
    """Return the present ranks of ``members`` of a generation. partly: leave out the ranks that left, unless all did.

    Raises: RanksLeft.
    """
    if generation in (AS_NOW, len(moves)):
        return Address(members, len(moves), members)
    then = list(members.ranks())
    now = ranks_now(moves, generation, then)
    if left := [rank for rank, found in zip(then, now, strict=True) if found == GONE]:
        if not partly or len(left) == len(then):
            raise RanksLeft(left)
        members = members.select([rank for rank in then if rank not in left])
        now = [rank for rank in now if rank != GONE]
    return Address(arranged_now(members, now), len(moves), members)


Values: TypeAlias = ValueMesh[Any]
Answers: TypeAlias = RequestFuture[Values]
"""The answers of members, of the type that the endpoint returns, which its caller knows."""


class Router(Protocol):
    """The part of a process that references need."""

    @property
    def mailboxes(self) -> Mailboxes:
        """The mailboxes of this process."""

    @property
    def session(self) -> str:
        """The id of the session."""

    @property
    def place(self) -> Place:
        """The place at which this process is reached."""

    @property
    def host(self) -> str:
        """The id of the host of this rank; empty for a program, which may be on none."""

    def new_mailbox(self) -> int:
        """Return an unused number for a mailbox."""

    def find(self, mesh: int, members: Members, generation: int, *, partly: bool = False) -> Address:
        """Return the present address of processes (`find_now`). Raises: RanksLeft, MeshStoppedError."""

    def call(self, request: CallRequest) -> Answers:
        """Call a mailbox, with a generation as `find` gave it. Raises: MeshStoppedError, WorkerLost."""

    def await_procs(self, mesh: int) -> None:
        """Wait until the processes of a mesh are there, before a reference to them is sent. Raises: MeshError."""

    @property
    def supervisor(self) -> Port[MeshFailure] | None:
        """The port for failures of actors that are spawned here."""

    def get_or_spawn(
        self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Future[TActor]:
        """Return a future of the one actor of this name in the session."""

    def procs(self, session: str, mesh: int, name: str, members: Members, generation: int) -> MeshView:
        """Return the object for a reference to processes: a `ProcMesh`, or a `meshbook.actor.actor_mesh.ProcRef`."""


class ProcessRouters:
    """The routers of this process: its own, and those of the sessions that it drives."""

    def __init__(self) -> None:
        self._of_sessions: dict[str, tuple[Router, int]] = {}
        """The routers by session, each with the `meshbook.concurrency.forks.generation` of the process that made it."""
        self._own: Callable[[], Router] | None = None
        self._is_rank = False
        self._made_in = 0
        """The generation of a rank."""

    def set_own(self, own: Callable[[], Router], *, is_rank: bool = False) -> None:
        """Set the router by which this process makes ports. is_rank: all references speak through it.

        A rank keeps its own: `meshbook.mesh` may be imported there at any time.
        """
        if is_rank or not self._is_rank:
            self._own, self._is_rank, self._made_in = own, is_rank, forks.generation

    def add(self, session: str, router: Router) -> None:
        """Have references of ``session`` speak through ``router`` here."""
        self._of_sessions[session] = router, forks.generation

    def remove(self, session: str) -> None:
        """Forget a session that has ended, or was left."""
        self._of_sessions.pop(session, None)

    def is_rank(self) -> bool:
        """Whether this process is a rank of a mesh."""
        return self._is_rank

    def current(self) -> Router:
        """Return the process's own. Raises: UsageError in one that belongs to no session, or was forked by a rank."""
        if self._is_rank and self._made_in != forks.generation:
            forks.refuse_inherited(self._made_in)
        if self._own is None:
            raise UsageError(
                "this process is neither a rank of a mesh nor the one that drives meshes; spawn a mesh first."
            )
        return self._own()

    def find(self, session: str) -> Router:
        """Return the router for references of ``session``. Raises: UsageError if this process does not drive it."""
        if (found := self._of_sessions.get(session)) is not None:
            router, made_in = found
            if made_in != forks.generation:
                forks.refuse_inherited(made_in)
            return router
        if self._own is not None and (self._is_rank or not session):
            return self.current()
        raise UsageError(
            f"this is a reference into session {session}, which this process does not drive. "
            f'Attach it: meshbook.attach("{session}").'
        )


routers = ProcessRouters()
is_rank, current_router, router_for = routers.is_rank, routers.current, routers.find
