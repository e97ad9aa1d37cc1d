"""Calls that workers make beyond their own host: to mailboxes of the controller's process, and to other hosts' workers.

To workers the controller's process is rank 0 of mesh 0. Their calls come in under the turn
(`meshbook.controller.io_turns`), so handlers run there; the owners of mailboxes load and answer on their threads.

Calls to workers of other hosts go from agent to agent; the controller introduces the agents to each other:

    agent a: AskPeers(mesh)  ──>  controller  ── OpenPeerPort(a, its key) ──>  agents of the mesh's other hosts
    agent a: Peers(mesh)    <──              <── PeerPort(a, endpoint) ──────
    agent a ── calls of its workers ──> agent b                    (CURVE; b lets in only a)

An agent that has asked is told again when ranks have moved; all agents are told of lost hosts. All under the turn.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from meshbook.calls.mailboxes import CallArguments, IncomingCall, IncomingCalls, Outcome, describe, pack
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.payloads import Payloads
from meshbook.errors import MailboxClosed
from meshbook.shape.members import group
from meshbook.values.pickling import loads
from meshbook.wire import messages as wire


class ControllerMail:
    """The mail of one controller: calls that ranks make to its mailboxes. submit: runs a closure under the turn."""

    def __init__(self, payloads: Payloads, submit: Callable[[Callable[[], None]], None]) -> None:
        self._incoming = IncomingCalls()
        self.boxes, self.on_cancel, self.give_up = self._incoming.boxes, self._incoming.cancel, self._incoming.give_up
        self._payloads, self._submit = payloads, submit
        self._strange: set[int] = set()  # mailboxes of the session's former controllers for which messages have come

    def on_call(self, host: HostState, call: wire.Call, frames: Sequence[bytes]) -> None:
        """Take a call of a worker of ``host``. Under the turn."""
        buffers = self._payloads.receive(host, call)

        def load() -> CallArguments:
            args: CallArguments = loads(frames[0] if frames else call.inline, buffers, where="the controller's process")
            return args

        def send(answer: Outcome, duration_s: float) -> None:
            self._reply(host, call, answer, duration_s)

        error = self._incoming.deliver(IncomingCall(call, load, lambda: None, send), 0, socket.gethostname())
        if isinstance(error, MailboxClosed) and not (error.why or self.boxes.was_open(call.mailbox)):
            self._tell_lost(call)

    def _tell_lost(self, call: wire.Call) -> None:
        """Say, once, that messages to a mailbox are lost; their sender expects no answer."""
        if call.mailbox not in self._strange:
            self._strange.add(call.mailbox)
            sender = f"rank {call.origin.rank}" if call.origin is not None else "a rank"
            print(
                f"{sender} has sent to a port that a former process of this session had opened: it is lost, "
                "and so is what follows. Open a new Channel and pass its port on.",
                file=sys.stderr,
            )

    def _reply(self, host: HostState, call: wire.Call, answer: Outcome, duration_s: float) -> None:
        """Send an answer. Any thread may call it."""
        status, frames, inline, segment = pack(
            answer, self._payloads.write, lambda error: describe(error, 0, socket.gethostname())
        )
        reply = wire.RankReply(0, status, len(frames), duration_s, None, None, inline)

        def send() -> None:
            self._incoming.open.pop((call.origin, call.id), None)
            self._payloads.send_reply(host, call.id, call.origin, reply, frames, segment)

        self._submit(send)


class PeerDirectory:
    """The introductions between agents. key_of: the public key of a host. ip: the address of this machine's agents."""

    def __init__(
        self,
        hosts: Mapping[str, HostState],
        meshes: Mapping[int, MeshState],
        key_of: Callable[[str], str],
        ip: Callable[[], str],
    ) -> None:
        self._hosts, self._meshes, self._key_of, self._ip = hosts, meshes, key_of, ip
        # (host, mesh) that was asked for, to the placement that the host knows
        self.told: dict[tuple[str, int], object] = {}
        # (caller's host, called host) to how they meet; without an endpoint while that is being opened
        self.met: dict[tuple[str, str], wire.Meeting] = {}

    def on_ask(self, host: HostState, ask: wire.AskPeers) -> None:
        """Note that workers of a host call a mesh."""
        for broken in ask.broken:
            self.met.pop((host.id, broken), None)
        for known in ask.known:  # from a former controller's time
            self.met.setdefault((host.id, known), wire.Meeting("known", 0))
        self.told[host.id, ask.mesh] = None
        self.settle()

    def on_port(self, host: HostState, port: wire.PeerAddress) -> None:
        """Note the port at which a host lets another one in."""
        if (meeting := self.met.get((port.host, host.id))) is not None:
            self.met[port.host, host.id] = meeting._replace(endpoint=port.endpoint, problem=port.problem)
        self.settle()

    def settle(self) -> None:
        """Send the answers that are known by now; cheap when there is nothing new."""
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
        """Have the other hosts of a mesh let ``host`` in; return whether all do."""
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
        """Tell the agents that a host is lost, so that they answer for its ranks at once."""
        self.met = {pair: meeting for pair, meeting in self.met.items() if lost.id not in pair}
        for host in self._hosts.values():
            if host is not lost and not host.lost and host.hello is not None:
                host.send_urgent(wire.PeerLost(lost.id, lost.lost))
