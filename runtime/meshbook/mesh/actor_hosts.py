"""Hosts and singletons, in the notebook and on ranks: `this_host`, `get_or_spawn_controller`, `shutdown_context`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from meshbook.actor.context import context
from meshbook.actor.proc_ref import ProcRef
from meshbook.actor.router import current_router
from meshbook.actor.this_worker import this_worker
from meshbook.concurrency.future import Future
from meshbook.mesh import driven
from meshbook.mesh.host_mesh import HostMesh

TActor = TypeVar("TActor")


class HostRef:
    """The host of a rank, as that rank knows it."""

    def spawn_procs(
        self, per_host: Mapping[str, int] | None = None, bootstrap: Callable[[], object] | None = None, **options: Any
    ) -> ProcRef:
        """Start processes here, as `meshbook.mesh.host_mesh.HostMesh.spawn_procs` does.

        They end with the actor that has called this; those of a cell live until the session ends. Call it in a plain
        endpoint: it waits. Raises: as that.
        """
        sizes = {"procs": 1} if per_host is None else dict(per_host)
        procs: ProcRef = current_router().spawn_procs(sizes, {**options, "bootstrap": bootstrap}).get()
        if (belongings := context().belongings) is not None:
            belongings.add(procs)
        return procs


def this_host() -> HostMesh | HostRef:
    """The machine this runs on: that of the notebook, or that of the rank."""
    return driven.this_host() if this_worker() is None else HostRef()


def get_or_spawn_controller(name: str, cls: type[TActor], /, *args: Any, **kwargs: Any) -> Future[TActor]:
    """The actor of which there is one in the session, by its name; made now if there is none.

    It lives in a process of its own beside the notebook. Works on ranks, too.
    """
    return current_router().get_or_spawn(name, cls, args, kwargs)


def shutdown_context() -> Future[None]:
    """Stop every mesh and host of this process, as `meshbook.shutdown` does; done when it returns."""
    driven.shutdown()
    done: Future[None] = Future()
    done.set_result(None)
    return done
