"""The actor that runs now: its identity, its caller and call, the actors that it owns, and the form of its log records.

Log records of actors begin with ``[actor=<root>.<train.Learner learners>]``, without the rank, which a notebook and
`logging_option` show anyhow: so equal lines of several ranks become one. ``%(actor_prefix)s`` has the rank.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from meshbook.actor.router import Place, current_router
from meshbook.concurrency.future import Future
from meshbook.errors import MeshError, UsageError
from meshbook.shape.members import Extent, Members, Point, Region

if TYPE_CHECKING:
    from meshbook.actor.ports import Port
    from meshbook.actor.supervision import MeshFailure
    from meshbook.shape.members import MeshView


Self = TypeVar("Self", bound="EndsWithBlock")

ROOT_NAME = "root"
"""The name of the program itself, where an actor's name would stand."""


class ActorControl(Protocol):
    """Ends the actor that runs; on its own thread."""

    def stop_itself(self, reason: str) -> None:
        """Take no more messages, and end after the messages that have come."""

    def fail_itself(self, reason: str, *, now: bool) -> None:
        """End as failed, which the owner is told. now: without waiting for its call, and without ``__cleanup__``."""


_NOWHERE = Point(0, Extent((), ()))


class ActorInstance:
    """An actor, or the program itself, which is called ``root``. Equal to others that name the same actor."""

    def __init__(
        self,
        name: str,
        class_name: str,
        mesh_name: str,
        rank: Point,
        mailbox: int,
        *,
        module: str = "",
        creator: ActorInstance | None = None,
        place: Place | None = None,
        procs: Members | None = None,
        control: ActorControl | None = None,
    ) -> None:
        """procs: all processes of the mesh. control: of an actor that lives here."""
        self.name, self.class_name, self.mesh_name = name, class_name, mesh_name
        self.rank = rank
        """Its place among the processes of its mesh."""
        self.mailbox, self.module = mailbox, module
        self.creator = creator
        """The actor, or program, that spawned it; None for the program."""
        self._place, self._procs, self._control = place, procs, control

    @property
    def actor_id(self) -> str:
        """Names it among all: ``main.trainers[3]``; the program is ``client``."""
        if not self.mailbox:
            return "client"
        return f"{self.mesh_name}.{self.name}[{self.rank.rank}]" if self.mesh_name else self.name

    @property
    def proc(self) -> MeshView:
        """Its process, as a mesh without axes."""
        from meshbook.actor.actor_mesh import find_procs  # what spawns actors knows of us

        if self._place is None:
            procs: MeshView = importlib.import_module("meshbook").this_proc()  # which stands above us
            return procs
        members = Region.build(self._place.rank, [])
        return find_procs(current_router().session, self._place.mesh, self.mesh_name, members, self._place.generation)

    @property
    def proc_mesh(self) -> MeshView:
        """The mesh of processes in which it lives."""
        from meshbook.actor.actor_mesh import find_procs

        if self._place is None or self._procs is None:
            return self.proc
        place = self._place
        return find_procs(current_router().session, place.mesh, self.mesh_name, self._procs, place.generation)

    @property
    def proc_id(self) -> str:
        """Names its process: ``main[3]``; that of the program is ``client``."""
        if self._place is None or not self._place.mesh:
            return "client"
        return f"{self.mesh_name}[{self._place.rank}]"

    def stop(self, reason: str = "stopped by itself") -> None:
        """End this actor behind the messages that have come; `__cleanup__` runs. Later calls fail with ``reason``."""
        self._controlled().stop_itself(reason)

    def abort(self, reason: str = "") -> None:
        """End this actor as failed when the message that it handles is done: its owner is told.

        ``__cleanup__`` gets the error; messages that wait, and later ones, fail with ``reason``.
        """
        self._controlled().fail_itself(f"actor explicitly aborted due to: {reason or 'no reason provided'}", now=False)

    def kill(self, reason: str = "") -> None:
        """End this actor as `abort` does, but at once: its message is interrupted, and no ``__cleanup__`` runs."""
        self._controlled().fail_itself(f"actor was killed: {reason}", now=True)

    def _controlled(self) -> ActorControl:
        if self._control is None:
            is_program = "the program itself; meshbook.shutdown() ends what it has started"
            where = "elsewhere" if self.mailbox else is_program
            raise UsageError(f"only the actor that runs can end itself, and {self} is {where}.")
        return self._control

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorInstance) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.name, self.mesh_name, self.mailbox, self.rank

    def __getstate__(self) -> dict[str, object]:
        """Elsewhere it tells of the actor, and ends nothing."""
        return {**vars(self), "_control": None}

    def __repr__(self) -> str:
        if not self.mailbox:
            return f"<{ROOT_NAME}>"
        return self._path(repr(self.creator or root_instance()), repr(self.rank) if len(self.rank) else "")

    @property
    def shared_name(self) -> str:
        """The ``repr`` without ranks: the same on all processes, so that equal lines which have it stay equal."""
        if not self.mailbox:
            return repr(self)
        return self._path((self.creator or root_instance()).shared_name)

    def _path(self, creator: str, where: str = "") -> str:
        """Return the path of the actor below its creator: ``<root>.<train.Learner learners{'gpus': 0/2}>``."""
        kind = f"{self.module}.{self.class_name}" if self.module else self.class_name
        return f"{creator}.<{kind} {self.name}{where}>"


def root_instance() -> ActorInstance:
    """The program, or a cell on a rank: no actor."""
    return ActorInstance(ROOT_NAME, "", "", _NOWHERE, 0)


WAIT_S = 6.0
"""The time that an ending actor gives its own actors to end; longer than one that heeds no interrupt is waited for."""


class Owned(Protocol):
    """A mesh of actors or of processes."""

    @property
    def is_stopped(self) -> bool:
        """Whether the actor was stopped from this process."""

    def stop(self, reason: str = ...) -> Future[None]:
        """Begin its end; done when it has ended."""


class EndsWithBlock:
    """A mesh of actors or of processes that a ``with`` block, or ``async with``, stops at its end."""

    def stop(self, reason: str = "") -> Future[None]:
        """Begin its end; done when it has ended."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop().get()

    async def __aenter__(self: Self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


class Belongings:
    """The actors and processes that an actor has spawned, which end with it. Any thread."""

    def __init__(self) -> None:
        self._owned: list[Owned] = []
        self._lock = threading.Lock()

    def add(self, owned: Owned) -> None:
        """Add a mesh that the actor has spawned."""
        with self._lock:
            self._owned = [one for one in self._owned if not one.is_stopped]
            self._owned.append(owned)

    def stop(self) -> None:
        """End all of them and wait; meshes that do not end in time are left alone. Raises nothing."""
        with self._lock:
            owned, self._owned = self._owned, []
        ends = []
        for one in owned:
            with contextlib.suppress(MeshError):
                ends.append(one.stop("the actor that had spawned it was stopped"))
        until = time.monotonic() + WAIT_S
        for end in ends:
            with contextlib.suppress(MeshError, TimeoutError):
                end.get(max(0.0, until - time.monotonic()))


class Context(msgspec.Struct, eq=False):
    """The answer of `context`: the actor, its place among the called actors, and the call."""

    actor_instance: ActorInstance
    find_message_rank: Callable[[], Point]
    supervisor: Port[MeshFailure] | None = None
    """The port for failures of meshes that are spawned now; None outside of actors."""
    belongings: Belongings | None = None
    """The belongings to which meshes that are spawned now are added; None outside of actors."""
    endpoint: str = ""
    """The endpoint that is being called."""
    chain: tuple[int, ...] = ()
    """The chain of the message; see `wire.Call`."""
    on_wait: Callable[[int], None] | None = None
    """A callback for each call that the message waits for; None if the actor takes other messages meanwhile."""
    waits: set[int] = set()
    """Calls, by their names in chains, that the message waits for without a limit."""
    interrupted: bool = False
    """Whether the sender of the message wants its end."""

    @contextlib.contextmanager
    def waiting_for(self, name: int) -> Iterator[None]:
        """Note a wait without limit for a call, inside the block. name: in chains, 0 for a call that is in none."""
        if not name or self.on_wait is None:
            yield
            return
        self.waits.add(name)
        try:
            self.on_wait(name)
            yield
        finally:
            self.waits.discard(name)

    @property
    def message_rank(self) -> Point:
        """The actor's place in the mesh, or slice, that was called."""
        return self.find_message_rank()

    def __repr__(self) -> str:
        return f"Context({self.actor_instance.actor_id}, message_rank={self.message_rank})"


_client = Context(root_instance(), lambda: _NOWHERE)
current_context: ContextVar[Context] = ContextVar("meshbook_actor", default=_client)
"""Set while an actor handles a message; tasks that it starts inherit it."""


def context() -> Context:
    """Return the actor that runs now, and its place among the actors that were called together with it."""
    return current_context.get()


def current_rank() -> Point:
    """The place of this actor in the mesh, or slice, that was called: a mapping of axis to coordinate."""
    return context().message_rank


def current_size() -> dict[str, int]:
    """The axes of the mesh, or slice, that was called."""
    return dict(context().message_rank.extent)


def current_actor_name() -> str:
    """Names this actor among all: ``main.trainers[3]``."""
    return context().actor_instance.actor_id


def name_actors_in_logs() -> None:
    """Have records of `logging` that actors of this process make carry their names. Idempotent."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, NamedRecords):
        logging.setLogRecordFactory(NamedRecords(make))


class NamedRecords:
    """Makes records as another factory does; those of an actor begin with its name, and `actor_prefix` has its rank."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        actor = context().actor_instance
        record.actor_prefix = f"[actor={actor}] " if actor.mailbox else ""
        if actor.mailbox:
            prefix = f"[actor={actor.shared_name}] "
            record.msg = f"{prefix.replace('%', '%%') if record.args else prefix}{record.msg}"
        return record
