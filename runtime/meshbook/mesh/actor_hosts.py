"""Hosts and singletons, in the notebook and on ranks: `HostRef`, `get_or_spawn_controller`, `shutdown_context`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshbook.actor.actor_mesh import ProcRef, ask_controller
from meshbook.actor.context import context
from meshbook.actor.endpoint import ActorFuture
from meshbook.actor.router import TActor, current_router, is_rank
from meshbook.concurrency.future import Future, MappedFuture
from meshbook.formatting import format_sizes
from meshbook.mesh import driven
from meshbook.mesh.host_mesh import HostMesh
from meshbook.mesh.spawn_options import (
    BootstrapCommand,
    check_bootstrap,
    checked_bindings,
    checked_python,
    checked_sizes,
)
from meshbook.shape.members import Members, MeshView, Point, Region, members_of


class SentHosts(NamedTuple):
    """Hosts that a rank got by a reference."""

    session: str
    hosts: tuple[str, ...]
    """Their ids."""
    env: Mapping[str, str]


class ComingProcs(ProcRef):
    """Processes that a rank has asked for and that may not be there yet.

    `initialized`, `spawn` and sending the reference wait for them, and raise the error that keeps them.
    """

    def __init__(self, members: Members, asked: ActorFuture[ProcRef]) -> None:
        MeshView.__init__(self, members)  # the rest is told by who starts them
        self._asked, self._stopped = asked, False

    def __getattr__(self, name: str) -> object:
        if name not in ("session", "id", "name", "_generation"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        there = self._asked.get()
        self.session, self.id, self.name, self._generation = there.session, there.id, there.name, there._generation
        return getattr(self, name)

    def _part(self, members: Members) -> ComingProcs:
        return ComingProcs(members, self._asked)

    @property
    def initialized(self) -> Future[bool]:
        """True when they are there. Raises, when asked: the error that keeps them, SpawnError most of the time."""
        return MappedFuture(self._asked, lambda _: True)

    def __repr__(self) -> str:
        return super().__repr__() if self._asked.done() else f"ProcMesh({format_sizes(self.sizes)}), which comes up"


class HostRef(MeshView):
    """Hosts, as a rank knows them: its own, which has no axes unless they are made, or some that were sent to it."""

    def __init__(self, members: Members | None = None, python: str = "", sent: SentHosts | None = None) -> None:
        """python: the interpreter of processes that are spawned here; empty for that of the rank.

        sent: which they are, where it is not the rank's own.
        """
        super().__init__(Region.of({}) if members is None else members)
        self._python, self._sent = python, sent

    def _part(self, members: Members) -> HostRef:
        return HostRef(members, self._python, self._sent)

    def with_python_executable(self, python_executable: str | os.PathLike[str]) -> HostRef:
        """Return the same hosts with another interpreter, which must have meshbook. Raises: UsageError."""
        return HostRef(members_of(self), checked_python(python_executable), self._sent)

    def __eq__(self, other: object) -> bool:
        """Whether both mean the same hosts, with the same axes; however they came here."""
        if not isinstance(other, HostRef):
            return NotImplemented
        return (self._ids, self.extent) == (other._ids, other.extent)

    def __hash__(self) -> int:
        return hash(self.extent)

    @property
    def _ids(self) -> tuple[str, ...]:
        if self._sent is None:
            return (current_router().host,) * len(self)
        return tuple(self._sent.hosts[rank] for rank in self.ranks)

    @property
    def stream_logs(self) -> bool:
        """False: the prints of calls are shown where the program runs, by its own setting."""
        return False

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
        """Start processes here, as `meshbook.mesh.host_mesh.HostMesh.spawn_procs` does; returns at once.

        They end with the actor that has called this; those of a cell live until the session ends. Their first use waits
        until they are there; `ProcMesh.initialized` tells, and can be awaited. Raises: UsageError.
        """
        sizes = {} if per_host is None else checked_sizes(per_host)
        if bootstrap is not None:
            check_bootstrap(bootstrap)
        checked_bindings(proc_bind, math.prod(sizes.values()))
        members = Region.of({**self.sizes, **sizes})
        if self._sent is not None:
            options["on"] = self
        else:
            sizes = {**self.sizes, **sizes}
        belongings = context().belongings
        if self._python and bootstrap_command is None and self._sent is None:
            bootstrap_command = BootstrapCommand(self._python)
        options |= {
            "bootstrap": bootstrap,
            "name": name,
            "proc_bind": proc_bind,
            "bootstrap_command": bootstrap_command,
        }
        asked = ask_controller("spawn_procs", (sizes, belongings is not None), options, "this_host")
        procs = ComingProcs(members, asked)
        if belongings is not None:
            belongings.add(procs)
        return procs

    def __reduce__(self) -> tuple[object, ...]:
        session, env = (current_router().session, {}) if self._sent is None else (self._sent.session, self._sent.env)
        return find_hosts, (session, self._ids, dict(self.extent), env, self._python)


def find_hosts(
    session: str, hosts: tuple[str, ...], sizes: Mapping[str, int], env: Mapping[str, str], python: str
) -> HostMesh | HostRef:
    """Return the hosts that a reference names. Raises: UsageError where this process drives another session."""
    members = Region.of(sizes)
    if is_rank():
        return HostRef(members, python, SentHosts(session, hosts, env))
    return driven.sent_hosts(session, hosts, members, env, python)


def get_or_spawn_controller(name: str, cls: type[TActor], /, *args: object, **kwargs: object) -> Future[TActor]:
    """The actor of which there is one in the session, by its name; made now if there is none.

    It lives in a process of its own beside the notebook. Works on ranks, too.
    """
    return current_router().get_or_spawn(name, cls, args, kwargs)


def shutdown_context() -> Future[None]:
    """Stop every mesh and host of this process, as `meshbook.shutdown` does; done when it returns."""
    driven.shutdown()
    return Future.completed(None)
