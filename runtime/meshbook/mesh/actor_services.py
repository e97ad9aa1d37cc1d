"""What ranks ask of the process that drives the meshes: processes beside them, and actors of which there is one.

It is the mailbox `ROOT` of rank 0 of mesh 0. Work is done on side threads, since it waits for hosts and runs the user's
code. Processes that an actor has started end with it: one that is stopped sees to that itself
(`meshbook.actor.context.Belongings`), one that is killed cannot.
"""

from __future__ import annotations

import functools
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from meshbook.actor.router import Place, TActor
from meshbook.calls.answer import Outcome
from meshbook.calls.incoming import refusal
from meshbook.calls.mailboxes import LoadArgs, ReplyTo
from meshbook.concurrency.background import run_in_background
from meshbook.controller.controller import Controller
from meshbook.controller.mesh_state import MeshState
from meshbook.errors import MeshError, MeshStoppedError
from meshbook.shape.generations import ranks_now
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh
    from meshbook.mesh.proc_mesh import ProcMesh

SINGLE = "controllers"
"""The name of the mesh of one process in which the actors of `get_or_spawn` live."""


class _Owned(NamedTuple):
    """rank, generation: the owner's process, as its mesh numbered ranks then."""

    rank: int
    generation: int
    procs: ProcMesh


class ControllerServices:
    """Of one controller. spawn_procs: starts processes on the host of a place."""

    def __init__(
        self, controller: Controller, spawn_procs: Callable[[Place, Mapping[str, int], Mapping[str, Any]], ProcMesh]
    ) -> None:
        self._controller, self._spawn_procs = controller, spawn_procs
        self._lock = threading.Lock()
        self._procs: ProcMesh | None = None
        self._singles: dict[str, ActorMesh[object]] = {}
        self._owning = threading.Lock()
        """Not the other, which is held while processes start: deaths are told on the thread that starts them."""
        self._owned: dict[int, list[_Owned]] = {}
        """What actors have started, by their mesh."""

    def get_or_spawn(self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]) -> TActor:
        """The one actor of this name; made now if there is none, or not any more."""
        with self._lock:
            if self._procs is None or not self._procs.alive or self._procs.lost:
                self._singles.clear()  # they ended with the process
                if self._procs is not None:
                    self._procs.stop()
                self._procs = self._spawn_procs(Place(0, 0), {}, {"name": SINGLE, "device": "cpu", "group": False})
            found = self._singles.get(name)
            if found is not None and not found.is_stopped:
                return cast(TActor, found)
            made = self._procs.spawn(name, cls, *args, **kwargs)
            self._singles[name] = cast("ActorMesh[object]", made)
            return made

    def handle(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """Answer a question that a rank asks."""

        def work() -> None:
            try:
                reply(Outcome(wire.OK, self._answer(call, load_args), has_value=True))
            except Exception as error:
                reply(refusal(error, 0, socket.gethostname()))

        run_in_background(work)

    def _answer(self, call: wire.Call, load_args: LoadArgs) -> object:
        args, kwargs = load_args()
        if call.endpoint == "get_or_spawn":
            return self.get_or_spawn(*args)
        if call.endpoint == "stop_procs":
            try:
                return args[0].stop().get()
            except MeshStoppedError:
                return None
        per_host, owned = args
        place = Place(call.origin.mesh, call.origin.rank) if call.origin is not None else Place(0, 0)
        procs = self._spawn_procs(place, per_host, kwargs)
        if owned:
            self._own(place, procs)
        return procs

    # ---- processes that actors have started ---------------------------------------------------------------------

    def _own(self, owner: Place, procs: ProcMesh) -> None:
        """An actor in the process ``owner`` has started them."""
        known = self._controller.find_mesh(owner.mesh)
        if known is None:  # it has ended meanwhile
            _stop(procs)
            return
        with self._owning:
            before = self._owned.get(owner.mesh)
            alive = [one for one in before or () if one.procs.alive]
            self._owned[owner.mesh] = [*alive, _Owned(owner.rank, known.generation, procs)]
        if before is None:
            known.stopped.add_done_callback(lambda _: self.owner_lost(known))
        if owner.rank in known.lost:
            self.owner_lost(known, [owner.rank])

    def owner_lost(self, mesh: MeshState, ranks: Collection[int] | None = None) -> None:
        """Processes of ``mesh`` have ended, all by default: so will what their actors have started. Returns at once."""
        with self._owning:
            owned = self._owned.pop(mesh.id, [])
            ends = [
                one for one in owned if ranks is None or ranks_now(mesh.moves, one.generation, [one.rank])[0] in ranks
            ]
            if left := [one for one in owned if one not in ends]:
                self._owned[mesh.id] = left
        for one in ends:
            run_in_background(functools.partial(_stop, one.procs))


def _stop(procs: ProcMesh) -> None:
    try:
        procs.stop()
    except (MeshError, TimeoutError):
        traceback.print_exc()
