"""Hosts and singletons, in the notebook and on ranks: `HostRef`, `get_or_spawn_controller`, `shutdown_context`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from meshbook.actor.context import context
from meshbook.actor.proc_ref import ProcRef, ask_controller
from meshbook.actor.router import TActor, current_router
from meshbook.concurrency.future import Future
from meshbook.mesh import driven
from meshbook.mesh.spawn_options import BootstrapCommand, checked_python
from meshbook.shape.members import Members, Point, Region
from meshbook.shape.view import MeshView


class HostRef(MeshView):
    """The host of a rank, as that rank knows it: one, so without axes unless they are made by `split` or `flatten`."""

    def __init__(self, members: Members | None = None, python: str = "") -> None:
        """python: the interpreter of what is spawned here; empty for that of the rank."""
        super().__init__(Region.of({}) if members is None else members)
        self._python = python

    def _part(self, members: Members) -> HostRef:
        return HostRef(members, self._python)

    def with_python_executable(self, python_executable: str | os.PathLike[str]) -> HostRef:
        """The same host, where processes run another interpreter; it must have meshbook. Raises: UsageError."""
        return HostRef(self.members, checked_python(python_executable))

    @property
    def initialized(self) -> Future[bool]:
        """True: we run there."""
        return Future.completed(True)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], object] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        **options: object,
    ) -> ProcRef:
        """Start processes here, as `meshbook.mesh.host_mesh.HostMesh.spawn_procs` does.

        They end with the actor that has called this; those of a cell live until the session ends. Call it in a plain
        endpoint: it waits. Raises: as that.
        """
        sizes = {**self.sizes, **({"procs": 1} if per_host is None else per_host)}
        belongings = context().belongings
        if self._python and bootstrap_command is None:
            bootstrap_command = BootstrapCommand(self._python)
        options |= {
            "bootstrap": bootstrap,
            "name": name,
            "proc_bind": proc_bind,
            "bootstrap_command": bootstrap_command,
        }
        procs: ProcRef = ask_controller("spawn_procs", (sizes, belongings is not None), options, "this_host").get()
        if belongings is not None:
            belongings.add(procs)
        return procs


def get_or_spawn_controller(name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> Future[TActor]:
    """The actor of which there is one in the session, by its name; made now if there is none.

    It lives in a process of its own beside the notebook. Works on ranks, too.
    """
    return current_router().get_or_spawn(name, cls, args, kwargs)


def shutdown_context() -> Future[None]:
    """Stop every mesh and host of this process, as `meshbook.shutdown` does; done when it returns."""
    driven.shutdown()
    return Future.completed(None)
