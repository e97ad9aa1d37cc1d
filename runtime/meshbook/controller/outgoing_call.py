"""A call on its way from its caller to the hosts."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.calls.call import OpenCall
from meshbook.calls.output import OutputTarget
from meshbook.calls.request import CallRequest
from meshbook.controller.dispatcher import Dispatcher
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.lifecycle import MeshPhase
from meshbook.wire import messages as wire


class OutgoingCall:
    """Sent by `send` under the turn, when nothing has to come before it; `fail` tells its caller why it is not."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        mesh: MeshState,
        request: CallRequest,
        call: OpenCall,
        output: OutputTarget | None,
        message: wire.Call,
        payload: Sequence[bytes],
        segment: wire.SegmentRef | None,
    ) -> None:
        self._dispatcher, self._mesh, self._request, self._call, self._output = dispatcher, mesh, request, call, output
        self._message, self._payload, self._segment = message, payload, segment
        self._generation = mesh.generation
        self._hosts: Sequence[HostState] = ()

    def send(self) -> None:
        """Expect its answers, and send it, or have it queue."""
        mesh, request = self._mesh, self._request
        if mesh.generation != self._generation:
            self._call.give_up(stale_view(mesh))
            return
        recovery = self._dispatcher.groups_of(mesh)
        if not request.reply:
            recovery.send(request.mailbox, request.members, self._transmit)
        elif (hosts := self._dispatcher.open(mesh, self._call, self._output)) is not None:
            self._hosts = hosts
            recovery.send(request.mailbox, request.members, self._transmit, self._call)

    def fail(self, error: Exception) -> None:
        """It cannot be sent."""
        self._dispatcher.calls.disown(self._call)
        self._call.give_up(error)

    def _transmit(self) -> None:
        """In the midst of something else, if it has queued."""
        mesh, hosts = self._mesh, self._hosts
        try:
            if mesh.generation != self._generation:  # it queued while ranks got other numbers
                self.fail(stale_view(mesh))
                return
            if not self._request.reply and mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED):
                hosts = list(mesh.by_host(self._request.members.ranks()))
            self._dispatcher.payloads.send(hosts, self._message, self._payload, self._segment)
            self._dispatcher.note_backlog(hosts)
        except Exception as error:
            self.fail(error)
