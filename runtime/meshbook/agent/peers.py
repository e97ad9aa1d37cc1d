"""The agents of other hosts, as an agent knows them: a client for each one to call, a port for the callers.

The controller says where ranks live (`meshbook.controller.mail.PeerDirectory`); calls wait for that once, in their
order. `ForwardedCalls` holds the calls that have left this host by one uplink, until they are answered or it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from meshbook.agent.peer_server import Callee, PeerServer
from meshbook.agent.resources import HostResources
from meshbook.agent.worker import AgentWorker
from meshbook.errors import MeshError, PeerProtocolError
from meshbook.errors.advice import advice
from meshbook.shape.members import group
from meshbook.system.interfaces import WANTED, address_towards, in_endpoint, own_address, wanted_interfaces
from meshbook.system.os_errors import explain
from meshbook.system.processes import is_same_process, start_time
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.link import Uplink
from meshbook.wire.replies import failed_replies, failed_reply, lost_replies, split_replies
from meshbook.wire.ticket import Ticket

PATIENCE_S = 10.0  # calls wait so long for the controller to say where their ranks live
KEPT_PLANS = 256
# a peer that was not heard of for so long is lost, unless its machine answers, or it is seen to live on ours
MAX_SILENCE_S = 10.0

WaitingCall = tuple[AgentWorker, wire.Call, Sequence[Buffer]]


class Part(NamedTuple):
    """The part of a target that lies on one other host."""

    ranks: tuple[int, ...]
    target: wire.Target
    host: str


class PeerClient:
    """The connection to another agent, for which we are a host that dials in: calls of our workers go there, answers
    come back. The connection is lost once `lost` says why."""

    def __init__(
        self,
        host: HostResources,
        ticket: Ticket,
        make_calls: Callable[[Uplink], ForwardedCalls],
        pid: int = 0,
    ) -> None:
        """ticket: to the port of the other agent. pid: its process, if it is on this machine. Raises: OSError."""
        self._pid, self._started = pid, start_time(pid) if pid else None
        self._from, self._endpoint = host.name, ticket.endpoint
        self.lost = ""  # why it is lost: its host is lost, or out of our reach
        self._uplink = Uplink(host.dialer, ticket, host.loop, self._on_message)
        self.calls = make_calls(self._uplink)  # the calls that went there
        self.beat()

    def serve(self) -> None:
        """Send and receive until there is no message."""
        if not self.lost:
            try:
                self._uplink.serve()
            except (*wire.MALFORMED, PeerProtocolError) as error:
                self.lost = f"its host is lost: it sent something impossible: {error}"

    def _on_message(self, header: bytes, payload: list[bytes]) -> None:
        match wire.decode_to_host(header):
            case wire.Replies() as replies:
                self.calls.on_replies(replies, payload)
            case other:
                raise PeerProtocolError(f"{type(other).__name__} is not for another agent to send")

    def beat(self) -> None:
        """Send heartbeats and notice silence; once a second."""
        self._uplink.look()
        is_seen_alive = self._started is not None and is_same_process(self._pid, self._started)
        if self._uplink.unanswered_s > MAX_SILENCE_S and not is_seen_alive:
            self.lost = self.lost or self._silence()
        if not self.lost:
            self._uplink.beat()

    def _silence(self) -> str:
        if self._uplink.end.has_arrived:
            return f"its host is lost: no sign of life for {MAX_SILENCE_S:g} s, and its machine does not answer"
        return (
            f"host {self._from} cannot reach its host at {self._endpoint}, by which messages between hosts go: "
            f"{advice().shared_network}"
        )

    def close(self, death: wire.DeathCause) -> None:
        """Give up the connection, and answer for the ranks over there."""
        self.lost = self.lost or "it was closed"
        self._uplink.close()
        self.calls.lose(death)


class Mail(Callee, Protocol):
    """The mail of a host, as its peers need it (`meshbook.agent.mail.AgentMail`)."""

    @property
    def environment(self) -> Mapping[bytes, bytes]:
        """Return the variables asked for the ranks of the meshes here."""

    def resume(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Pass a call on that has waited."""

    def give_up(self, sender: AgentWorker, call: wire.Call, death: wire.DeathCause) -> None:
        """Answer for a call that was not passed on."""

    def calls_by(self, uplink: Uplink) -> ForwardedCalls:
        """Return a new table of the calls that go by an uplink."""


class AgentPeers:
    """The peers of one agent, and its calls that wait for them. is_there: whether there is a controller."""

    def __init__(self, mail: Mail, host: HostResources, is_there: Callable[[], bool]) -> None:
        self._mail, self._host, self._is_there = mail, host, is_there
        self._loop, self._send = host.loop, host.uplink.send_urgent
        self._clients: dict[str, PeerClient] = {}
        self._lost: dict[str, wire.DeathCause] = {}  # hosts to which there is no connection (any more)
        self._where: dict[int, tuple[wire.Peer, ...]] = {}
        self._plans: dict[tuple[int, wire.Target], tuple[Part, ...]] = {}
        self._waiting: dict[int, deque[WaitingCall]] = {}  # calls to meshes whose hosts are not known
        self._port: PeerServer | None = None
        self.active = False  # whether there has been any to serve

    # ---- calls of our workers -----------------------------------------------------------------------------------

    def must_wait(self, mesh: int, *, is_here: bool) -> bool:
        """Whether a call has to wait until the hosts of ``mesh`` are known. is_here: whether all ranks live here."""
        return mesh in self._waiting or not (is_here or mesh in self._where)

    def wait(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Keep a call until the hosts of its mesh are known."""
        queue = self._waiting.get(call.mesh)
        if queue is None:
            queue = self._waiting[call.mesh] = deque()
            self._send(wire.AskPeers(call.mesh, tuple(self._clients)))
            self._loop.call_later(PATIENCE_S, lambda: self._lose_patience(call.mesh, queue))
        queue.append((sender, call, payload))

    def take_waiting(self, cancel: wire.Cancel) -> WaitingCall | None:
        """Take a cancelled call out of the waiting ones."""
        for waiting in self._waiting.get(cancel.mesh, ()):
            if (waiting[1].origin, waiting[1].id) == (cancel.origin, cancel.call):
                self._waiting[cancel.mesh].remove(waiting)
                return waiting
        return None

    def parts(self, mesh: int, target: wire.Target) -> tuple[Part, ...]:
        """Return the parts of ``target`` that lie on other hosts."""
        found = self._plans.get((mesh, target))
        if found is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            ranks = [rank for part in target for rank in part.ranks()]
            parts = []
            for peer in self._where.get(mesh, ()):
                if mine := tuple(rank for rank in ranks if wire.target_has(peer.target, rank)):
                    parts.append(Part(mine, group(mine), peer.host))
            found = self._plans[mesh, target] = tuple(parts)
        return found

    def away(self, host: str) -> ForwardedCalls | wire.DeathCause:
        """Return the calls that go to a host, or why none can."""
        return self._clients[host].calls if host in self._clients else self._lost[host]

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass a cancel on to each host to which its call may have gone."""
        for client in self._clients.values():
            client.calls.cancel(cancel)

    def _lose_patience(self, mesh: int, queue: deque[WaitingCall]) -> None:
        if self._waiting.get(mesh) is not queue:
            return
        if self._is_there():  # it is stopped, or waits itself, for a host that is suspect
            self._loop.call_later(PATIENCE_S, lambda: self._lose_patience(mesh, queue))
        else:
            del self._waiting[mesh]
            death = wire.DeathCause("", f"nobody has said within {PATIENCE_S:g} s where it lives", "")
            for sender, call, _ in queue:
                self._mail.give_up(sender, call, death)

    # ---- what the controller says -------------------------------------------------------------------------------

    def on_peers(self, message: wire.Peers) -> None:
        """Take in where the ranks of a mesh live."""
        self._plans.clear()
        if message.peers:
            self._where[message.mesh] = message.peers
        else:
            self._where.pop(message.mesh, None)
        for peer in message.peers:
            self._meet(peer)
        waiting = self._waiting.pop(message.mesh, deque())
        for sender, call, payload in waiting:
            self._mail.resume(sender, call, payload)

    def _meet(self, peer: wire.Peer) -> None:
        if peer.meeting.problem:
            self._lose(peer.host, peer.meeting.problem, peer.name)
        elif peer.host not in self._clients and peer.meeting.epoch:
            ticket = msgspec.structs.replace(
                self._host.ticket, endpoint=peer.meeting.endpoint, controller_key=peer.key, epoch=peer.meeting.epoch
            )
            try:
                client = PeerClient(self._host, ticket, self._mail.calls_by, peer.pid)
            except OSError as error:
                self._lose(peer.host, f"this host's agent cannot connect to it: {error}", peer.name)
                return
            self._clients[peer.host] = client
            self.active = True
            self._lost.pop(peer.host, None)
        elif peer.host not in self._clients:
            self._lost[peer.host] = wire.DeathCause(peer.name, "the way to its host was lost; call again", "")

    def on_open(self, message: wire.OpenPeerPort) -> None:
        """Let the agent of another host in, whose workers are to call ours, and tell it the port."""
        try:
            if self._port is None:
                self._port = PeerServer(self._host, self._ip(message.ip), self._mail)
                self.active = True
            self._port.admit(message.host, message.key, message.epoch)
        except OSError as error:
            self._send(wire.PeerAddress(message.host, "", f"its agent cannot listen: {explain(error)}"))
            return
        self._send(wire.PeerAddress(message.host, self._port.endpoint))

    def _ip(self, proposed: str) -> str:
        """Return the address asked for the ranks here, else that by which the controller's network reaches us."""
        if found := wanted_interfaces(self._mail.environment.get(WANTED.encode(), b"").decode()):
            return in_endpoint(found[0].address)
        endpoint = self._host.ticket.endpoint
        if self._host.ticket.by_tunnel:  # of which only this end is known here
            return in_endpoint(own_address())
        if not endpoint.startswith("tcp://"):
            return proposed
        host, _, _ = endpoint.removeprefix("tcp://").rpartition(":")
        return in_endpoint(address_towards(host.strip("[]")))

    def on_lost(self, message: wire.PeerLost) -> None:
        """Note that a host is lost."""
        if self._port is not None:
            self._port.drop(message.host)
        if message.host in self._clients:
            self._lose(message.host, f"its host is lost: {message.reason}")

    def on_succession(self) -> None:
        """Ask a new controller for the hosts of all meshes: it does not know yet which agents have asked."""
        for mesh in {*self._where, *self._waiting}:
            self._send(wire.AskPeers(mesh, tuple(self._clients)))

    def _lose(self, host: str, why: str, name: str = "") -> None:
        name = name or next((peer.name for peers in self._where.values() for peer in peers if peer.host == host), host)
        death = self._lost[host] = wire.DeathCause(name, why, "")
        if host in self._clients:
            self._clients.pop(host).close(death)

    # ---- the agent's loop ---------------------------------------------------------------------------------------

    def serve(self, *, choked: bool) -> bool:
        """Send and receive; return whether to look again before a sleep. choked: too much waits to be read."""
        busy = self._port is not None and self._port.serve(choked=choked)
        for host, client in tuple(self._clients.items()):
            client.serve()  # until there is nothing
            if client.lost:
                busy = True
                self._lose(host, client.lost)
                for mesh, peers in tuple(self._where.items()):  # where else its ranks may be reached
                    if any(peer.host == host for peer in peers):
                        self._send(wire.AskPeers(mesh, tuple(self._clients), (host,)))
        if choked:
            self._loop.call_later(0.01, lambda: None)
        return busy

    def beat(self) -> None:
        """Send heartbeats, and notice silent peers; once a second."""
        for client in self._clients.values():
            client.beat()
        if self._port is not None:
            self._port.beat()


ForwardedKey: TypeAlias = tuple[wire.Origin | None, int]


class ForwardedCalls:
    """The calls sent by one uplink: to the controller's process, or to the agent of another host. answer: hands answers
    to the worker that has called. discard: lets go of a payload that is not wanted."""

    def __init__(
        self,
        uplink: Uplink,
        host: HostResources,
        answer: Callable[[AgentWorker, wire.Replies, Sequence[Buffer]], None],
        discard: Callable[[wire.SegmentRef], None],
    ) -> None:
        self.uplink = uplink
        self._host, self._answer, self._discard = host, answer, discard
        self._open: dict[ForwardedKey, tuple[AgentWorker, set[int]]] = {}  # the senders, and the ranks that are asked

    def send(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer], ranks: Collection[int]) -> None:
        """Send a call that is for ``ranks`` over there."""
        segment = bulk = None
        if call.segment is not None:
            try:
                segment, bulk = self._host.segment_refs.export(call.segment, self.uplink)
            except MeshError as error:
                if call.reply:
                    self._answer(sender, *failed_replies(call, ranks, self._host.name, error))
                return
        if segment is not None:
            sender.lent.add(segment.segment)
        if call.reply:
            self._open[call.origin, call.id] = sender, set(ranks)
        self.uplink.send(msgspec.structs.replace(call, segment=segment, bulk=bulk), payload)

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass on a cancel of a call that is not answered."""
        if (cancel.origin, cancel.call) in self._open:
            self.uplink.send(cancel)

    def lose(self, death: wire.DeathCause) -> None:
        """Answer for all calls: no answer comes from there any more."""
        opened, self._open = self._open, {}
        for (origin, id), (sender, ranks) in opened.items():
            self._answer(sender, lost_replies(id, [(rank, death) for rank in sorted(ranks)], origin), ())

    def on_replies(self, replies: wire.Replies, frames: Sequence[bytes]) -> None:
        """Hand on answers."""
        sender, ranks = self._open.get((replies.origin, replies.id), (None, set()))
        kept: list[wire.RankReply] = []
        mine: list[bytes] = []
        for reply, part in split_replies(replies, frames):
            if reply.bulk is not None:
                reply, part = self._bring(reply, part)
            if reply.rank in ranks:  # else nobody there was asked
                ranks.discard(reply.rank)
                kept.append(reply)
                mine += part
            elif reply.segment is not None:
                self._discard(reply.segment)
        if sender is not None and not ranks:
            del self._open[replies.origin, replies.id]
        if sender is not None and kept:
            self._answer(sender, wire.Replies(replies.id, tuple(kept), replies.origin), mine)

    def _bring(self, reply: wire.RankReply, frames: Sequence[bytes]) -> tuple[wire.RankReply, Sequence[bytes]]:
        """Put a payload that came in pieces into our shared memory."""
        assert reply.bulk is not None
        try:
            segment = self._host.pool.write(self.uplink.take_payload(*reply.bulk))
        except MeshError as error:
            return failed_reply(reply, self._host.name, error)
        return reply._replace(segment=segment, bulk=None), frames
