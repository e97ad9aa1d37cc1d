"""Meshes of processes as their ranks know them: to slice, to spawn actors on, and to send on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshbook.actor.actor_mesh import spawn_actors
from meshbook.actor.futures import ActorFuture, only_value
from meshbook.actor.ports import one_member
from meshbook.actor.router import ROOT, TActor, current_router, router_for
from meshbook.calls.mailboxes import CONTROLLER_MESH
from meshbook.calls.request import CallRequest
from meshbook.concurrency.future import Future
from meshbook.errors import UsageError
from meshbook.formatting import format_sizes
from meshbook.shape.members import Members, Region
from meshbook.shape.view import MeshView
from meshbook.values.pickling import dumps


class ProcRef(MeshView):
    """A `ProcMesh` that was sent to a rank. Sent back to whoever drives the mesh, it is a ProcMesh again."""

    def __init__(self, session: str, mesh: int, name: str, members: Members, generation: int) -> None:
        """generation: in which ``members`` have their numbers (`meshbook.shape.generations`)."""
        super().__init__(members)
        self.session, self.id, self.name, self._generation = session, mesh, name, generation
        self._stopped = False

    def _part(self, members: Members) -> ProcRef:
        return ProcRef(self.session, self.id, self.name, members, self._generation)

    def spawn(self, name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> TActor:
        """Make an actor in every process, as `ProcMesh.spawn` does; the actor that runs now is their owner."""
        router = router_for(self.session)
        return spawn_actors(router, self.id, self.name, self._members, name, cls, args, kwargs, self._generation)

    @property
    def initialized(self) -> Future[bool]:
        """True: who has a reference to processes has it since they are there."""
        return Future.completed(True)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by this reference."""
        return self._stopped

    def stop(self, reason: str = "stopped by an actor") -> Future[None]:
        """End every process of the mesh, views included; done when none is left. Idempotent.

        Raises: UsageError where it is the program's own.
        """
        if self.id == CONTROLLER_MESH:
            raise UsageError("this is the process of the program itself; meshbook.shutdown() ends what it has started.")
        self._stopped = True
        return ask_controller("stop_procs", (self,), {}, "procs")

    def __enter__(self) -> ProcRef:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop().get()

    async def __aenter__(self) -> ProcRef:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def __reduce__(self) -> tuple[object, ...]:
        return find_procs, (self.session, self.id, self.name, self._members, self._generation)

    def __repr__(self) -> str:
        if self.id == CONTROLLER_MESH:
            return "ProcMesh(the process of the program)"
        return f'ProcMesh("{self.name}", {format_sizes(self.sizes)}), as a rank knows it'


def find_procs(session: str, mesh: int, name: str, members: Members, generation: int) -> MeshView:
    """The mesh of processes that a reference means."""
    return router_for(session).procs(session, mesh, name, members, generation)


def ask_controller(
    endpoint: str, args: tuple[object, ...], kwargs: Mapping[str, object], name: str
) -> ActorFuture[Any]:
    """On a rank: ask the process that drives the meshes (`meshbook.mesh.actor_router`) for something."""
    what = f"{name}.{endpoint}"
    pickled = dumps((args, dict(kwargs)), what=what)
    source = current_router().call(CallRequest(endpoint, one_member(0), pickled, what, mailbox=ROOT))
    return ActorFuture(source, only_value, name, endpoint)


def this_proc() -> ProcRef:
    """The process in which this runs, as a mesh without axes: that of a rank, or that of the program."""
    router = current_router()
    place = router.place
    return ProcRef(router.session, place.mesh, "", Region.build(place.rank, []), place.generation)
