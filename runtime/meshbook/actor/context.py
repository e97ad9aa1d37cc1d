"""Who is asked and for whom: `context`, `current_rank`, `current_size`, `current_actor_name`; and what it owns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import msgspec

from meshbook.actor.instance import ActorInstance, root_instance
from meshbook.concurrency.future import Future
from meshbook.errors import MeshError
from meshbook.shape.members import Extent, Point

if TYPE_CHECKING:
    from meshbook.actor.ports import Port
    from meshbook.actor.supervision import MeshFailure


WAIT_S = 6.0
"""How long an actor that ends waits for what it owns; longer than one that does not heed an interrupt is waited for."""


class Owned(Protocol):
    """A mesh of actors or of processes."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped from this process."""

    def stop(self, reason: str = ...) -> Future[None]:
        """Begin its end; done when it has ended."""


class Belongings:
    """What an actor has spawned: actors, and processes of `this_host`. It ends with the actor. On any thread."""

    def __init__(self) -> None:
        self._owned: list[Owned] = []
        self._lock = threading.Lock()

    def add(self, owned: Owned) -> None:
        """The actor has spawned it."""
        with self._lock:
            self._owned = [one for one in self._owned if not one.is_stopped]
            self._owned.append(owned)

    def stop(self) -> None:
        """End all of it, and wait; what has ended before, or does not end in time, is left alone. Raises nothing."""
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
    """What `context` returns: who is asked, for whom, and by which call."""

    actor_instance: ActorInstance
    find_message_rank: Callable[[], Point]
    supervisor: Port[MeshFailure] | None = None
    """Where failures of what is spawned now are told; None outside of actors."""
    belongings: Belongings | None = None
    """What is spawned now belongs to them; None outside of actors."""
    endpoint: str = ""
    """The endpoint that is being called."""
    chain: tuple[int, ...] = ()
    """That of the message; see `wire.Call`."""
    on_wait: Callable[[int], None] | None = None
    """Told of each call that the message waits for; None where the actor takes other messages meanwhile."""
    waits: set[int] = set()
    """Calls, by their names in chains, that the message waits for without a limit."""
    interrupted: bool = False
    """Whether the sender of the message wants its end."""

    @contextlib.contextmanager
    def waiting_for(self, name: int) -> Iterator[None]:
        """Around a wait for a call that has no limit. name: in chains, 0 for a call that is in none."""
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


def _nowhere() -> Point:
    return Point(0, Extent((), ()))


_client = Context(root_instance(), _nowhere)
current_context: ContextVar[Context] = ContextVar("meshbook_actor", default=_client)
"""Set while an actor handles a message; tasks that it starts inherit it."""


def context() -> Context:
    """The actor that runs now, and its place among those that were called together with it."""
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
