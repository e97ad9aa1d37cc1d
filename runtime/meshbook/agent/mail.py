"""Calls of workers, which their agent passes on to mailboxes of other workers, with the answers on the way back.

    worker ──Call──> agent ──Call, with its origin──> members that live here        the controller sees nothing of this
           <─Replies──    <───────Reply──────────────
                         ──Call──> the controller, for mailboxes of its process (rank 0 of mesh 0)
                         ──Call──> agents of other hosts, for their members

A rank that cannot answer is answered for (`wire.LOST`). A sender of more than a member reads is told to wait
(`wire.MailHold`): its calls, not its answers, and only to that member.

Workers of one host that often call each other have direct links (`meshbook.wire.direct`), of which the agent sees
nothing but large answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

from meshbook.agent.peers import AgentPeers, ForwardedCalls
from meshbook.agent.resources import HostResources
from meshbook.agent.worker import AgentWorker
from meshbook.agent.worker_pool import WorkerPool
from meshbook.shape.members import AS_NOW, group
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.link import Uplink
from meshbook.wire.replies import dropped_replies, lost_replies

HOLD_BYTES = 8 << 20  # senders to a worker are told to wait, when so much waits for it, until all of it has been sent


MailAnswer: TypeAlias = Callable[[wire.Replies, Sequence[Buffer]], None]  # takes the answers to a worker's call


class HostedMesh(Protocol):
    """The workers of a mesh on this host (`meshbook.agent.mesh.AgentMesh`)."""

    worker_pool: WorkerPool

    @property
    def environment(self) -> Mapping[bytes, bytes]:
        """Return the variables asked for its ranks."""

    @property
    def workers(self) -> Mapping[int, AgentWorker]:
        """Return its workers by rank."""

    @property
    def is_all_here(self) -> bool:
        """Whether no rank of the mesh lives on another host."""

    def call(self, call: wire.Call, payload: Sequence[Buffer], answer: MailAnswer) -> Sequence[AgentWorker]:
        """Pass a call on to its members here, and return them."""

    def cancel(self, cancel: wire.Cancel) -> None:
        """Pass a cancel on to its members here."""

    def death(self, rank: int) -> wire.DeathCause:
        """Return why a rank that has no worker here does not answer."""


class AgentMail:
    """The mail of one host. meshes: the meshes with workers here. is_there: see `meshbook.agent.peers.AgentPeers`."""

    def __init__(self, host: HostResources, meshes: Mapping[int, HostedMesh], is_there: Callable[[], bool]) -> None:
        self._host, self._meshes, self._segment_refs = host, meshes, host.segment_refs
        self.controller = self.calls_by(host.uplink)  # calls that are the controller's to answer
        self.peers = AgentPeers(self, host, is_there)
        # senders that wait for a worker that reads too slowly, or for room on an uplink, with the hold they were sent
        self.held: dict[AgentWorker | Uplink, dict[AgentWorker, wire.MailHold]] = {}

    @property
    def environment(self) -> Mapping[bytes, bytes]:
        """Return the variables asked for the ranks of the meshes here; of two meshes the later one counts."""
        return {name: value for mesh in self._meshes.values() for name, value in mesh.environment.items()}

    def call(self, sender: AgentWorker, mesh_id: int, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Pass on a call of a worker of mesh ``mesh_id``."""
        call = msgspec.structs.replace(call, origin=wire.Origin(mesh_id, sender.rank, sender.pid))
        if call.mesh == 0:
            self.controller.send(sender, call, payload, (0,))
            if self.controller.uplink.is_full:
                self._hold(self.controller.uplink, sender, wire.MailHold(0, (0,), True))
            return
        if call.segment is not None:
            self._segment_refs.lend((call.segment.pid, call.segment.segment))  # until it has been passed on
        mesh = self._meshes.get(call.mesh)
        if self.peers.must_wait(call.mesh, is_here=mesh is not None and mesh.is_all_here):
            self.peers.wait(sender, call, payload)
        else:
            self.resume(sender, call, payload)

    def resume(self, sender: AgentWorker, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Pass a call on to its members, wherever they live."""
        answer = functools.partial(self._answer, sender)
        here = call
        if parts := self.peers.parts(call.mesh, call.target):
            elsewhere = {rank for part in parts for rank in part.ranks}
            rest = group(rank for part in call.target for rank in part.ranks() if rank not in elsewhere)
            here = msgspec.structs.replace(call, target=rest)
        if here.target:
            for worker in self.deliver(here, payload, answer):
                if worker.mail.unsent_bytes > HOLD_BYTES:
                    self._hold(worker, sender, wire.MailHold(call.mesh, (worker.rank,), True))
        for part in parts:
            away = self.peers.away(part.host)
            if isinstance(away, ForwardedCalls):
                away.send(sender, msgspec.structs.replace(call, target=part.target), payload, part.ranks)
                if away.uplink.is_full:
                    self._hold(away.uplink, sender, wire.MailHold(call.mesh, part.ranks, True))
            elif call.reply:
                answer(lost_replies(call.id, [(rank, away) for rank in part.ranks], call.origin), ())
        if call.segment is not None:
            self._segment_refs.end((call.segment.pid, call.segment.segment))

    def give_up(self, sender: AgentWorker, call: wire.Call, death: wire.DeathCause) -> None:
        """Answer for a call that was not passed on."""
        if call.reply:
            ranks = [rank for part in call.target for rank in part.ranks()]
            self._answer(sender, lost_replies(call.id, [(rank, death) for rank in ranks], call.origin), ())
        if call.segment is not None:
            self._segment_refs.end((call.segment.pid, call.segment.segment))

    def deliver(self, call: wire.Call, payload: Sequence[Buffer], answer: MailAnswer) -> Sequence[AgentWorker]:
        """Pass on a call all of whose members live here, or lived; return the members that do."""
        mesh = self._meshes.get(call.mesh)
        if call.generation not in (AS_NOW, len(self._host.moves.get(call.mesh, ()))):
            mesh, dead = None, _MOVING
        elif mesh is not None and mesh.worker_pool.ending:
            mesh, dead = None, _STOPPED
        else:
            dead = _STOPPED
        if mesh is not None:
            members = mesh.call(call, payload, answer)
        else:
            members = ()
            if call.segment is not None:
                self.discard(call.segment)
        if call.reply and len(members) < sum(part.total for part in call.target):
            lost = [rank for part in call.target for rank in part.ranks() if mesh is None or rank not in mesh.workers]
            deaths = [mesh.death(rank) if mesh is not None else dead for rank in lost]
            answer(lost_replies(call.id, zip(lost, deaths, strict=True), call.origin), ())
        return members

    def cancel(self, sender: AgentWorker, mesh_id: int, cancel: wire.Cancel) -> None:
        """Pass on the cancel of a worker for its call."""
        cancel = msgspec.structs.replace(cancel, origin=wire.Origin(mesh_id, sender.rank, sender.pid))
        if cancel.mesh == 0:
            self.controller.cancel(cancel)
        elif (waiting := self.peers.take_waiting(cancel)) is not None:
            _, call, _ = waiting
            if call.segment is not None:
                self._segment_refs.end((call.segment.pid, call.segment.segment))
            ranks = {rank for part in call.target for rank in part.ranks()}
            self._answer(sender, dropped_replies(call.id, ranks, call.origin), ())
        else:
            self.cancel_here(cancel)
            self.peers.cancel(cancel)

    def cancel_here(self, cancel: wire.Cancel) -> None:
        """Pass on a cancel to the members that live here."""
        if (mesh := self._meshes.get(cancel.mesh)) is not None:
            mesh.cancel(cancel)

    def calls_by(self, uplink: Uplink) -> ForwardedCalls:
        """Return a new table of the calls that go by an uplink."""
        return ForwardedCalls(uplink, self._host, self._answer, self.discard)

    def _answer(self, sender: AgentWorker, replies: wire.Replies, frames: Sequence[Buffer]) -> None:
        """Hand answers to the worker that has called."""
        for reply in replies.replies:
            if reply.segment is not None and sender.has_ended:
                self.discard(reply.segment)
            elif reply.segment is not None:
                self._segment_refs.lend((reply.segment.pid, reply.segment.segment), [sender])
        if not sender.has_ended:
            sender.send_mail([wire.encode(replies), *frames])

    def answer_to(self, origin: wire.Origin) -> MailAnswer:
        """Return what takes the answers to a call of a worker of this host that did not come by us."""
        mesh = self._meshes.get(origin.mesh)
        workers = mesh.workers.values() if mesh is not None else ()
        if (sender := next((one for one in workers if one.pid == origin.pid), None)) is not None:
            return functools.partial(self._answer, sender)
        return self._discard_all

    def _discard_all(self, replies: wire.Replies, frames: Sequence[Buffer]) -> None:
        for reply in replies.replies:
            if reply.segment is not None:
                self.discard(reply.segment)

    def discard(self, segment: wire.SegmentRef) -> None:
        """Drop a payload that no call wants."""
        self._segment_refs.lend((segment.pid, segment.segment))
        self._segment_refs.end((segment.pid, segment.segment))

    # ---- back-pressure ------------------------------------------------------------------------------------------

    def _hold(self, reader: AgentWorker | Uplink, sender: AgentWorker, hold: wire.MailHold) -> None:
        """Have a sender wait until `release` of the one that reads too slowly."""
        waiting = self.held.setdefault(reader, {})
        if sender not in waiting:
            waiting[sender] = hold
            sender.urgent.send([wire.encode(hold)])

    def release(self, reader: AgentWorker | Uplink) -> None:
        """Release the senders that wait for a reader: it has read its mail, or will read no more."""
        for sender, hold in self.held.pop(reader, {}).items():
            if not sender.has_ended:
                sender.urgent.send([wire.encode(msgspec.structs.replace(hold, held=False))])

    def settle(self) -> None:
        """Release the senders for which uplinks have room again; once per turn of the agent's loop."""
        for uplink in [each for each in self.held if isinstance(each, Uplink) and not each.is_full]:
            self.release(uplink)


_MOVING = wire.DeathCause("", "the ranks of its mesh are getting other numbers just now; call again", "")
_STOPPED = wire.DeathCause("", "its mesh was stopped, or was never on this host", "")
