"""Calls of workers, which their agent passes on: to mailboxes of other workers, and answers on the way back.

    worker ──Call──> agent ──Call, with its origin──> members that live here        the controller sees nothing of this
           <─Replies──    <───────Reply──────────────
                         ──Call──> the controller, for mailboxes of its process (rank 0 of mesh 0)

A rank that cannot answer is answered for (`wire.LOST`). Who sends more than a member reads is told to wait
(`wire.MailHold`): its calls, not its answers, and only to that member.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from meshbook import wire
from meshbook.away_calls import AwayCalls, Road, lost_reply
from meshbook.errors import Failure, MeshError
from meshbook.frames import Buffer
from meshbook.hosted_worker import HostedWorker
from meshbook.loans import Loans
from meshbook.segments import SegmentPool

if TYPE_CHECKING:
    from meshbook.hosted_mesh import HostedMesh

HOLD_BYTES = 8 << 20
"""With so much waiting for one worker, those who send to it are told to wait until all of it has been sent."""


class HostedMail:
    """Of one host. meshes: those that have workers here. controller: the road to its process. pool: the agent's own."""

    def __init__(
        self, host: str, meshes: Mapping[int, HostedMesh], loans: Loans, controller: Road, pool: SegmentPool
    ) -> None:
        self._host, self._meshes, self._loans = host, meshes, loans
        self.controller = AwayCalls(controller, pool, self._answer, self._discard, self._explain)
        """The calls that are the controller's to answer."""
        self._held: dict[HostedWorker, set[HostedWorker]] = {}
        """Workers that read too slowly, with those who wait for it."""
        self._held_by_road: dict[Road, dict[HostedWorker, wire.MailHold]] = {}
        """Who waits for room on a road, and what they were told."""

    def call(self, sender: HostedWorker, mesh_id: int, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Pass on what a worker of mesh ``mesh_id`` has called."""
        call = msgspec.structs.replace(call, origin=wire.Origin(mesh_id, sender.rank, sender.pid))
        if call.mesh == 0:
            self.controller.send(sender, call, payload, (0,))
            self._hold_if_full(self.controller.road, sender, wire.MailHold(0, (0,), True))
            return
        key = (call.segment.pid, call.segment.segment) if call.segment is not None else None
        if key is not None:
            self._loans.lend(key)
        mesh = self._meshes.get(call.mesh)
        members: Sequence[HostedWorker] = ()
        if mesh is not None:
            members = mesh.call(call, payload, functools.partial(self._answer, sender))
            self._hold_if_slow(sender, mesh.id, members)
        if call.reply and len(members) < sum(part.total for part in call.target):
            self._answer_for_the_lost(sender, call, mesh)
        if key is not None:
            self._loans.end(key)

    def cancel(self, sender: HostedWorker, mesh_id: int, cancel: wire.Cancel) -> None:
        """Pass on that a worker wants the end of its call."""
        cancel = msgspec.structs.replace(cancel, origin=wire.Origin(mesh_id, sender.rank, sender.pid))
        if cancel.mesh == 0:
            self.controller.cancel(cancel)
        elif (mesh := self._meshes.get(cancel.mesh)) is not None:
            mesh.cancel(cancel)

    def _answer(self, sender: HostedWorker, replies: wire.Replies, frames: Sequence[Buffer]) -> None:
        """Hand answers to the worker that has called."""
        for reply in replies.replies:
            if reply.segment is not None and sender.has_ended:
                self._discard(reply.segment)
            elif reply.segment is not None:
                self._loans.lend((reply.segment.pid, reply.segment.segment), [sender])
        if not sender.has_ended:
            sender.send_mail([wire.encode(replies), *frames])

    def _discard(self, segment: wire.SegmentRef) -> None:
        """Nobody wants this payload."""
        self._loans.lend((segment.pid, segment.segment))
        self._loans.end((segment.pid, segment.segment))

    def _explain(self, rank: int, error: MeshError) -> bytes:
        return explained(rank, self._host, error)

    def _answer_for_the_lost(self, sender: HostedWorker, call: wire.Call, mesh: HostedMesh | None) -> None:
        lost = [rank for part in call.target for rank in part.ranks() if mesh is None or rank not in mesh.workers]
        deaths = [mesh.death(rank) if mesh is not None else _STOPPED for rank in lost]
        self._answer(sender, lost_replies(call.id, zip(lost, deaths, strict=True), call.origin), ())

    # ---- back-pressure ------------------------------------------------------------------------------------------

    def _hold_if_slow(self, sender: HostedWorker, mesh: int, members: Sequence[HostedWorker]) -> None:
        for worker in members:
            if worker.mail.unsent_bytes > HOLD_BYTES:
                waiting = self._held.setdefault(worker, set())
                if sender not in waiting:
                    waiting.add(sender)
                    sender.urgent.send([wire.encode(wire.MailHold(mesh, (worker.rank,), True))])
                    worker.mail.on_sent = functools.partial(self._release, worker, mesh, worker.rank)

    def _release(self, worker: HostedWorker, mesh: int, rank: int) -> None:
        worker.mail.on_sent = lambda: None
        for sender in self._held.pop(worker, ()):
            if not sender.has_ended:
                sender.urgent.send([wire.encode(wire.MailHold(mesh, (rank,), False))])

    def _hold_if_full(self, road: Road, sender: HostedWorker, hold: wire.MailHold) -> None:
        if road.is_full and sender not in (waiting := self._held_by_road.setdefault(road, {})):
            waiting[sender] = hold
            sender.urgent.send([wire.encode(hold)])

    def settle(self) -> None:
        """Once per turn of the agent's loop: let go on those for whom there is room again."""
        for road in [road for road in self._held_by_road if not road.is_full]:
            for sender, hold in self._held_by_road.pop(road).items():
                if not sender.has_ended:
                    sender.urgent.send([wire.encode(msgspec.structs.replace(hold, held=False))])


_STOPPED = wire.Death("", "its mesh was stopped, or was never on this host", "")


def lost_replies(call: int, lost: Iterable[tuple[int, wire.Death]], origin: wire.Origin | None) -> wire.Replies:
    """The answers in the name of ranks that have none."""
    return wire.Replies(call, tuple(lost_reply(rank, death) for rank, death in lost), origin)


def explained(rank: int, host: str, error: MeshError) -> bytes:
    """The payload of a reply that says why there is no other."""
    name, text = type(error).__name__, str(error)
    return msgspec.msgpack.encode(Failure(rank, host, name, text, (f"{name}: {text}",), "")[:6])
