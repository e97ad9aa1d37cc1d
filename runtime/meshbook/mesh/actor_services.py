"""What ranks ask of the process that drives the meshes: processes beside them, and actors of which there is one.

It is the mailbox `ROOT` of rank 0 of mesh 0. Work is done on side threads, since it waits for hosts and runs the user's
code.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from meshbook.actor.router import Place, TActor
from meshbook.calls.answer import Outcome
from meshbook.calls.incoming import refusal
from meshbook.calls.mailboxes import LoadArgs, ReplyTo
from meshbook.concurrency.background import run_in_background
from meshbook.errors import MeshStoppedError
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.actor.actor_mesh import ActorMesh
    from meshbook.mesh.proc_mesh import ProcMesh

SINGLE = "controllers"
"""The name of the mesh of one process in which the actors of `get_or_spawn` live."""


class ControllerServices:
    """Of one controller. spawn_procs: starts processes on the host of a place."""

    def __init__(self, spawn_procs: Callable[[Place, Mapping[str, int], Mapping[str, object]], ProcMesh]) -> None:
        self.spawn_procs = spawn_procs
        self.on_owned: Callable[[Place, ProcMesh], None] = lambda place, procs: None
        """Told of processes that an actor in the process at that place has started."""
        self._lock = threading.Lock()
        self._procs: ProcMesh | None = None
        self._singles: dict[str, ActorMesh[object]] = {}

    def get_or_spawn(self, name: str, cls: type[TActor], args: tuple[object, ...], kwargs: dict[str, object]) -> TActor:
        """The one actor of this name; made now if there is none, or not any more."""
        with self._lock:
            if self._procs is None or not self._procs.alive or self._procs.lost:
                self._singles.clear()  # they ended with the process
                if self._procs is not None:
                    self._procs.stop()
                options = {"name": SINGLE, "device": "cpu", "group": False}
                self._procs = self.spawn_procs(Place(0, 0), {}, options)
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
                args, kwargs = load_args()
                if call.endpoint == "get_or_spawn":
                    value: object = self.get_or_spawn(*args)
                elif call.endpoint == "stop_procs":
                    value = args[0].stop().get()
                else:
                    per_host, owned = args
                    origin = call.origin
                    place = Place(origin.mesh, origin.rank) if origin is not None else Place(0, 0)
                    procs = value = self.spawn_procs(place, per_host, kwargs)
                    if owned:
                        self.on_owned(place, procs)
            except MeshStoppedError as error:
                reply(Outcome(wire.OK, None, has_value=True) if call.endpoint == "stop_procs" else _refused(error))
            except Exception as error:
                reply(_refused(error))
            else:
                reply(Outcome(wire.OK, value, has_value=True))

        run_in_background(work)


def _refused(error: Exception) -> Outcome:
    return refusal(error, 0, socket.gethostname())
