"""A call on its way from its caller to the hosts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.output import OutputTarget
from meshbook.calls.request import CallRequest
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.lifecycle import MeshPhase
from meshbook.wire import messages as wire


class OutgoingCall(msgspec.Struct, eq=False):
    """Sent by `send` under the turn, when nothing has to come before it; `fail` tells its caller why it is not."""

    dispatcher: Dispatcher
    mesh: MeshState
    generation: int
    """Of the mesh, in which the members' ranks are meant."""
    request: CallRequest
    call: OpenCall
    output: OutputTarget | None
    message: wire.Call
    payload: Sequence[bytes]
    segment: wire.SegmentRef | None
    """What is too large for the payload."""
    waits: bool = False
    """Whether the mesh has to be there first (`meshbook.controller.arrival`)."""
    _hosts: Sequence[HostState] = ()

    def send(self) -> None:
        """Expect its answers, and send it, or have it queue."""
        mesh, request = self.mesh, self.request
        if self.waits and mesh.arrival is not None and not mesh.arrival.is_over:
            mesh.arrival.hold(self)
            return
        if mesh.generation != self.generation:
            self.call.give_up(stale_view(mesh))
            return
        recovery = self.dispatcher.recoveries.get(mesh.id) or self.dispatcher.groups_of(mesh)
        if not request.reply:
            recovery.send(request.mailbox, request.members, self._transmit)
        elif (hosts := self.dispatcher.open(mesh, self.call, self.output)) is not None:
            self._hosts = hosts
            recovery.send(request.mailbox, request.members, self._transmit, self.call)

    def fail(self, error: Exception) -> None:
        """It cannot be sent."""
        self.dispatcher.calls.disown(self.call)
        self.call.give_up(error)

    def _transmit(self) -> None:
        """In the midst of something else, if it has queued."""
        mesh, hosts = self.mesh, self._hosts
        try:
            if mesh.generation != self.generation:  # it queued while ranks got other numbers
                self.fail(stale_view(mesh))
                return
            shortcuts = self.dispatcher.shortcuts
            if not self.request.reply:
                shortcuts.note_cast(mesh)
                if mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED):
                    hosts = list(mesh.by_host(self.request.members.ranks()))
            if self.segment is not None:
                self.dispatcher.payloads.send(hosts, self.message, self.payload, self.segment)
                return
            message = self.message
            if self.request.reply and not self.payload and len(hosts) == 1 and not hosts[0].lost:
                left = shortcuts.send(hosts[0], mesh, self.call, message)
                if left is None:
                    return
                message = left
            for host in hosts:
                if not host.lost:
                    host.send(message, self.payload)
        except Exception as error:
            self.fail(error)
