"""One actor, as it and those whom it has made know it: what `meshbook.actor.context` tells."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NoReturn, Protocol

from meshbook.actor.router import Place, current_router
from meshbook.errors import UsageError
from meshbook.shape.members import Extent, Members, Point, Region

if TYPE_CHECKING:
    from meshbook.shape.view import MeshView

ROOT_NAME = "root"
"""What the program itself is called, where an actor's name would stand."""


class ActorControl(Protocol):
    """Ends the actor that runs; on its own thread."""

    def stop_itself(self, reason: str) -> None:
        """Take no more messages, and end after those that have come."""

    def fail_itself(self, reason: str, *, now: bool) -> None:
        """End as failed, which the owner is told. now: without waiting for what runs, and without ``__cleanup__``."""


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
        """Who has spawned it; None for the program."""
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
        from meshbook.actor.proc_ref import find_procs  # what spawns actors knows of us

        if self._place is None:
            procs: MeshView = importlib.import_module("meshbook").this_proc()  # which stands above us
            return procs
        members = Region.build(self._place.rank, [])
        return find_procs(current_router().session, self._place.mesh, self.mesh_name, members, self._place.generation)

    @property
    def proc_mesh(self) -> MeshView:
        """The mesh of processes in which it lives."""
        from meshbook.actor.proc_ref import find_procs

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
        """As `abort`, but at once: what it handles is interrupted, and no ``__cleanup__`` runs."""
        self._controlled().fail_itself(f"actor was killed: {reason}", now=True)

    def _controlled(self) -> ActorControl:
        if self._control is None:
            _refuse(self)
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
        return path_of(repr(self.creator or root_instance()), self.module, self.class_name, self.name, self.rank)

    @property
    def shared_name(self) -> str:
        """As its ``repr``, without ranks: the same on all processes, so that equal lines which have it stay equal."""
        if not self.mailbox:
            return repr(self)
        creator = (self.creator or root_instance()).shared_name
        return path_of(creator, self.module, self.class_name, self.name, _NOWHERE)


def path_of(creator: str, module: str, class_name: str, name: str, point: Point) -> str:
    """An actor below whoever has spawned it: ``<root>.<train.Learner learners{'gpus': 0/2}>``."""
    where = repr(point) if len(point) else ""
    kind = f"{module}.{class_name}" if module else class_name
    return f"{creator}.<{kind} {name}{where}>"


def _refuse(instance: ActorInstance) -> NoReturn:
    what = "the program itself; meshbook.shutdown() ends what it has started" if not instance.mailbox else "elsewhere"
    raise UsageError(f"only the actor that runs can end itself, and {instance} is {what}.")


def root_instance() -> ActorInstance:
    """The program, or a cell on a rank: no actor."""
    return ActorInstance(ROOT_NAME, "", "", _NOWHERE, 0)
