"""An agent's port for the agents of other hosts: made when the first of them is to call our workers.

To us each of them is a host that dials in, as agents are to the controller: the same socket, links, door and checks.
Only hosts that the controller has named are let in, by their keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from meshbook.agent.resources import HostResources
from meshbook.concurrency.background import tell
from meshbook.errors import MeshError, PeerProtocolError
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.link import HostLink
from meshbook.wire.replies import failed_replies, failed_reply, split_replies
from meshbook.wire.transport import ControllerSocket

TURN_MESSAGES = 256  # messages taken in before others have their turn


class Callee(Protocol):
    """The part of an agent that takes calls from other hosts (`meshbook.agent.mail.AgentMail`)."""

    def deliver(
        self, call: wire.Call, payload: Sequence[Buffer], answer: Callable[[wire.Replies, Sequence[Buffer]], None]
    ) -> object:
        """Pass on a call all of whose members live here, or lived."""

    def cancel_here(self, cancel: wire.Cancel) -> None:
        """Pass on a cancel to the members that live here."""

    def discard(self, segment: wire.SegmentRef) -> None:
        """Drop a payload that no call wants."""


class PeerServer:
    """The server of one agent for its peers. Raises: OSError if the system has no sockets for it."""

    def __init__(self, host: HostResources, ip: str, callee: Callee) -> None:
        self._host, self._callee = host, callee
        self._sock = ControllerSocket((host.ticket.public_key, host.ticket.secret_key))
        try:
            self.endpoint = self._sock.bind(f"tcp://{ip}:*")
        except OSError:
            self._sock.close()
            raise
        host.loop.watch(self._sock.fd, lambda: None)
        self._callers: dict[str, HostLink] = {}

    def admit(self, host_id: str, key: str, epoch: int) -> None:
        """Let a host in; its links count from the start."""
        if (former := self._callers.get(host_id)) is not None:
            former.lose("it has come anew")
        self._callers[host_id] = HostLink(host_id, epoch, self._sock)
        self._sock.readmit(host_id, key)

    def drop(self, host_id: str) -> None:
        """Let a host in no more: it is lost, or has sent a message that no host of ours sends."""
        if (host := self._callers.pop(host_id, None)) is not None:
            host.lose("it was dropped")
            self._sock.revoke(host_id)

    def serve(self, *, choked: bool) -> bool:
        """Send and receive messages; return whether there were any. choked: too much waits for slow workers, so callers
        should send no more for now."""
        for host in self._callers.values():
            host.connection.hold(choked)
            if host.connection.must_send or host.connection.must_answer:
                host.flush()
        self._sock.look()
        busy = False
        for host_id, frames in self._sock.receive(TURN_MESSAGES):
            busy = True
            if (caller := self._callers.get(host_id)) is None:
                continue
            try:
                for header, payload in caller.receive(frames):
                    self._hear(caller, wire.decode_from_host(header), payload)
                if caller.connection.must_answer:
                    caller.flush()
            except (*wire.MALFORMED, PeerProtocolError):
                self.drop(host_id)
            except Exception as error:
                tell(error, "a message of another host's agent")
        return busy

    def beat(self) -> None:
        """Send heartbeats, and open or shut the port; once a second."""
        for host in self._callers.values():
            host.beat()
        self._sock.watch_door()

    def _hear(self, host: HostLink, message: wire.FromHost, frames: list[bytes]) -> None:
        match message:
            case wire.Call() if message.origin is not None and message.mailbox:
                self._on_call(host, message, frames)
            case wire.Cancel() if message.origin is not None:
                self._callee.cancel_here(message)
            case other:
                raise PeerProtocolError(f"such a {type(other).__name__} is not for another agent to send")

    def _on_call(self, host: HostLink, call: wire.Call, frames: list[bytes]) -> None:
        if call.bulk is not None:
            try:
                segment = self._host.pool.write(host.take_payload(*call.bulk))
            except MeshError as error:
                if call.reply:
                    ranks = [rank for part in call.target for rank in part.ranks()]
                    host.send(*failed_replies(call, ranks, self._host.name, error))
                return
            call = msgspec.structs.replace(call, segment=segment, bulk=None)
        self._callee.deliver(call, frames, functools.partial(self._answer, host))

    def _answer(self, host: HostLink, replies: wire.Replies, frames: Sequence[Buffer]) -> None:
        """Send answers back; their large payloads in pieces, which are not copied before."""
        sent: list[wire.RankReply] = []
        mine: list[Buffer] = []
        for reply, part in split_replies(replies, frames):
            if reply.segment is not None:
                reply, part = self._cut(host, reply, reply.segment, part)
            sent.append(reply)
            mine += part
        if not host.lost:
            host.send(wire.Replies(replies.id, tuple(sent), replies.origin), mine)

    def _cut(
        self, host: HostLink, reply: wire.RankReply, segment: wire.SegmentRef, frames: Sequence[Buffer]
    ) -> tuple[wire.RankReply, Sequence[Buffer]]:
        if host.lost:
            self._callee.discard(segment)
            return reply._replace(segment=None), frames
        try:
            mapped, bulk = self._host.segment_refs.export(segment, host)
        except MeshError as error:
            return failed_reply(reply, self._host.name, error)
        return reply._replace(segment=mapped, bulk=bulk), frames
