"""Hosts as they are kept in the file of a job: found again while their session lives, here or by attaching to it.

A module of its own, beside the jobs, since it alone knows sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshbook.errors import AttachError
from meshbook.mesh.driven import attach, controller_of
from meshbook.mesh.host_mesh import HostMesh
from meshbook.sessions.listing import sessions
from meshbook.shape.members import Members


class KeptHosts(NamedTuple):
    """Some hosts of a session. hosts: the ids of all of them, of which ``members`` are these."""

    session: str
    hosts: tuple[str, ...]
    members: Members
    env: Mapping[str, str]
    python: str

    @property
    def live(self) -> bool:
        """Whether they are there: in this process's sessions, or in one that waits to be attached."""
        if (controller := controller_of(self.session)) is not None:
            known = {host.id for host in controller.hosts}
            return known.issuperset(self.hosts)
        return any(known.id == self.session and known.owner_pid is None for known in sessions())

    def find(self) -> HostMesh:
        """The hosts; their session is attached where that must be. Raises: AttachError."""
        controller = controller_of(self.session)
        if controller is None:
            attach(self.session)
            controller = controller_of(self.session)
        known = {host.id: host for host in controller.hosts} if controller is not None else {}
        if controller is None or not known.keys() >= set(self.hosts):
            raise AttachError("the hosts of the job have ended: kill() it, then apply() it again.")
        return HostMesh(controller, [known[id] for id in self.hosts], self.members, self.env, self.python)


def keep(hosts: HostMesh) -> KeptHosts:
    """What finds these hosts again."""
    return KeptHosts(*hosts.kept)
