"""What a controller writes down for the next one of its session: endpoints, hosts, meshes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from meshbook.controller.mesh_state import MeshState
from meshbook.sessions.folder import SavedHost, SavedMesh, SessionFolder
from meshbook.system.processes import in_endpoint, loopback_address


class SessionRecord:
    """Used by any thread."""

    def __init__(self, folder: SessionFolder) -> None:
        self._folder, self._state = folder, folder.state
        self._lock = threading.Lock()

    def save_hosts(self, hosts: Mapping[str, SavedHost]) -> None:
        """Note hosts that were started."""
        with self._lock:
            self._state.hosts.update(hosts)
            self._folder.save()

    def save_mesh(self, mesh: MeshState) -> None:
        """Note a mesh that has come up, or has changed: without this the next controller does not want it."""
        with self._lock:
            ids = [host.id for host in mesh.hosts]
            self._state.meshes[mesh.id] = SavedMesh(
                mesh.name, dict(mesh.extent), ids, mesh.owns_hosts, mesh.grouped, list(mesh.host_axes)
            )
            self._folder.save()

    def forget(self, meshes: Iterable[int] = (), hosts: Iterable[str] = ()) -> None:
        """Note that meshes and hosts have ended."""
        with self._lock:
            for mesh in meshes:
                self._state.meshes.pop(mesh, None)
            for host in hosts:
                self._state.hosts.pop(host, None)
            self._folder.save()

    def peer_ip(self) -> str:
        """Return where agents of this machine listen for others: as we do for agents elsewhere, if there are any."""
        tcp = [end for end in self._state.endpoints.values() if end.startswith("tcp://")]
        return tcp[0].removeprefix("tcp://").rpartition(":")[0] if tcp else in_endpoint(loopback_address())
