"""Agents that are to speak with each other for their workers: the controller tells them where and with whom.

    agent a: AskPeers(mesh)  ──>  controller  ── OpenPeerPort(a, its key) ──>  agents of the mesh's other hosts
    agent a: Peers(mesh)    <──              <── PeerPort(a, endpoint) ──────
    agent a ── calls of its workers ──> agent b                    (CURVE; b lets in nobody else)

Whoever has asked is told again when ranks have moved; all agents are told of lost hosts. All of it runs under the turn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.shape.slices import group
from meshbook.wire import messages as wire


class PeerDirectory:
    """Of one controller. key_of: the public key of a host. ip: where agents of this machine can be reached."""

    def __init__(
        self,
        hosts: Mapping[str, HostState],
        meshes: Mapping[int, MeshState],
        key_of: Callable[[str], str],
        ip: Callable[[], str],
    ) -> None:
        self._hosts, self._meshes, self._key_of, self._ip = hosts, meshes, key_of, ip
        self.told: dict[tuple[str, int], object] = {}
        """(host, mesh) that was asked for, to the placement that the host knows."""
        self.met: dict[tuple[str, str], wire.Meeting] = {}
        """(who calls, who is called) to how; without an endpoint while that is being opened."""

    def on_ask(self, host: HostState, ask: wire.AskPeers) -> None:
        """A host has workers that call a mesh."""
        for broken in ask.broken:
            self.met.pop((host.id, broken), None)
        for known in ask.known:  # from a former controller's time
            self.met.setdefault((host.id, known), wire.Meeting("known", 0))
        self.told[host.id, ask.mesh] = None
        self.settle()

    def on_port(self, host: HostState, port: wire.PeerAddress) -> None:
        """A host lets another one in."""
        if (meeting := self.met.get((port.host, host.id))) is not None:
            self.met[port.host, host.id] = meeting._replace(endpoint=port.endpoint, problem=port.problem)
        self.settle()

    def settle(self) -> None:
        """Tell what can be told by now; cheap when there is nothing new."""
        for (host_id, mesh_id), told in list(self.told.items()):
            mesh = self._meshes.get(mesh_id)
            host = self._hosts.get(host_id)
            if host is None or host.lost:
                del self.told[host_id, mesh_id]
            elif mesh is None:
                del self.told[host_id, mesh_id]
                host.send_urgent(wire.Peers(mesh_id, ()))
            elif told is not mesh.placement and mesh.is_whole and self._open(host, mesh):
                self.told[host_id, mesh_id] = mesh.placement
                peers = tuple(self._peer(host, other, mesh) for other in mesh.hosts if other is not host)
                host.send_urgent(wire.Peers(mesh_id, peers))

    def _open(self, host: HostState, mesh: MeshState) -> bool:
        """Have the other hosts of a mesh let ``host`` in; whether all do."""
        others = [other for other in mesh.hosts if other is not host and not other.lost]
        for other in others:
            if (host.id, other.id) not in self.met:
                epoch = int.from_bytes(os.urandom(4), "little") // 2 + 1
                meeting = self.met[host.id, other.id] = wire.Meeting("", epoch)
                other.send_urgent(wire.OpenPeerPort(host.id, self._key_of(host.id), meeting.epoch, self._ip()))
        return all(self.met[host.id, other.id].endpoint or self.met[host.id, other.id].problem for other in others)

    def _peer(self, host: HostState, other: HostState, mesh: MeshState) -> wire.Peer:
        meeting = self.met.get((host.id, other.id), wire.Meeting("", 0))
        target = group(mesh.ranks_on(other))
        problem = f"its host is lost: {other.lost}" if other.lost else meeting.problem
        pid = other.hello.pid if other.hello and host.hello and other.hello.machine == host.hello.machine else 0
        return wire.Peer(other.id, other.name, self._key_of(other.id), target, meeting._replace(problem=problem), pid)

    def lose(self, lost: HostState) -> None:
        """A host is lost: the agents answer for its ranks at once."""
        self.met = {pair: meeting for pair, meeting in self.met.items() if lost.id not in pair}
        for host in self._hosts.values():
            if host is not lost and not host.lost and host.hello is not None:
                host.send_urgent(wire.PeerLost(lost.id, lost.lost))
