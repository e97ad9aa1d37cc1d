"""Which hosts a handle means, what is asked of all that is spawned by it, and other handles of the same hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

from meshbook.controller.controller import Controller
from meshbook.controller.host_state import HostState
from meshbook.formatting import format_sizes
from meshbook.mesh.spawn_options import checked_python, checked_variables
from meshbook.shape.members import Members, Region
from meshbook.shape.view import MeshView, members_of

Self = TypeVar("Self", bound="HostView")


class HostView(MeshView):
    """Base of HostMesh."""

    def __init__(
        self,
        controller: Controller,
        hosts: list[HostState],
        members: Members | None = None,
        env: Mapping[str, str] | None = None,
        python: str = "",
        waits: bool = True,
    ) -> None:
        """hosts: all of them, of which ``members`` are these; by default it is one host, without axes.

        env: what all that is spawned here gets. python: the interpreter that it runs in; empty for that of the hosts.
        waits: see `without_waiting`.
        """
        super().__init__(Region.of({}) if members is None else members)
        self._controller, self._hosts, self._env = controller, hosts, checked_variables(env)
        self._python, self._waits = python, waits
        self._is_reference, self._anew = False, False
        self._spawned: set[int] = set()
        """What was spawned by this handle and its views, which `stop` ends, by the ids of the meshes."""

    def _part(self: Self, members: Members) -> Self:
        return self._like(members, _is_reference=self._is_reference or len(members) < len(self))

    def _like(self: Self, members: Members | None = None, **changes: object) -> Self:
        """The same hosts, or some of them, with some of our fields changed."""
        hosts = type(self).__new__(type(self))
        MeshView.__init__(hosts, members_of(self) if members is None else members)
        vars(hosts).update(vars(self), **changes)
        return hosts

    def with_environment(self: Self, env: Mapping[str, str]) -> Self:
        """The same hosts, where processes get more of an environment. Raises: UsageError."""
        return self._like(_env=checked_variables({**self._env, **env}))

    def with_python_executable(self: Self, python_executable: str | os.PathLike[str]) -> Self:
        """The same hosts, where processes, and those that these start beside themselves, run another interpreter.

        python_executable: on the hosts; it must have meshbook. Raises: UsageError.
        """
        return self._like(_python=checked_python(python_executable))

    def without_waiting(self: Self) -> Self:
        """The same hosts, where `spawn_procs` returns before processes are there, as Monarch's does.

        What is asked of them meanwhile waits; what keeps them is told by `ProcMesh.initialized`, by each call, and to
        `meshbook.actor.unhandled_fault_hook`.
        """
        return self._like(_waits=False)

    def running_python_anew(self: Self) -> Self:
        """The same hosts, where an interpreter that was named is run for each mesh, as for what a rank spawns."""
        return self._like(_anew=True)

    def apart(self: Self, spawned: set[int] | None = None) -> Self:
        """The same hosts by another handle, whose `stop` ends what was spawned by it alone.

        spawned: what has been so already, by the ids of the meshes.
        """
        return self._like(_spawned=set() if spawned is None else spawned)

    def as_owned(self: Self) -> Self:
        """The same hosts, for who has started them, though they are some of more: they are shut down by themselves."""
        return self._like(_is_reference=False)

    def as_reference(self: Self) -> Self:
        """The same hosts, for who has not started them: `shutdown` is refused."""
        return self._like(_is_reference=True)

    def __reduce__(self) -> tuple[object, ...]:
        """On a rank it is a `meshbook.mesh.actor_hosts.HostRef`."""
        from meshbook.mesh.actor_hosts import find_hosts  # which stands above us

        ids = tuple(host.id for host in self._present())
        return find_hosts, (self._controller.folder.id, ids, dict(self.extent), self._env, self._python)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostView):
            return NotImplemented
        return (self._present(), self.extent) == (other._present(), other.extent)

    def __hash__(self) -> int:
        return hash(self.extent)

    def __repr__(self) -> str:
        return f"HostMesh({format_sizes(self.sizes)})"

    @property
    def kept(self) -> tuple[str, tuple[str, ...], Members, Mapping[str, str], str]:
        """What finds the hosts again: the session, the ids of all its hosts, which of these, environment, Python."""
        ids = tuple(host.present().id for host in self._hosts)
        return self._controller.folder.id, ids, members_of(self), self._env, self._python

    def _present(self) -> list[HostState]:
        """The hosts, or those that have taken the places of lost ones."""
        return [self._hosts[rank].present() for rank in self.ranks]
