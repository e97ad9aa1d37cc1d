"""A call on its way to the hosts (`OutgoingCall`), and the queue of calls that may not be sent yet. Under the turn.

A rank that has failed a call would begin the next at once, and its collectives would meet older ones that other ranks
still wait in. So calls made meanwhile queue here, not on the ranks. A call that shares ranks and the mailbox with one
that queues is queued behind it: each rank gets its calls in the order of sending.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshbook.calls.call import CallRequest, OpenCall
from meshbook.calls.output import OutputTarget
from meshbook.concurrency.background import attempt
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState, stale_view
from meshbook.lifecycle import MeshPhase
from meshbook.shape.members import Members
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.controller.dispatcher import Dispatcher


class Unsent(NamedTuple):
    """A call, or a message without an answer, that waits to be sent. mailbox: 0 for main threads."""

    mailbox: int
    members: Members
    transmit: Callable[[], object]
    call: OpenCall | None
    since: float  # the time when it was queued

    @property
    def ranks(self) -> Collection[int]:
        """Return the ranks that have not answered it."""
        return self.call.waiting if self.call is not None else frozenset(self.members.ranks())


class CallQueue:
    """The queue. must_wait: whether a call may not be sent yet; asked at each `release`, and after ``patience_s``."""

    def __init__(self, must_wait: Callable[[Unsent], bool], patience_s: tuple[float, ...]) -> None:
        self._must_wait, self._patience_s = must_wait, patience_s
        self.queued: list[Unsent] = []
        self._wake_at = math.inf

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send a call or a message, now or as soon as it may be."""
        new = Unsent(mailbox, members, transmit, call, time.monotonic())
        if self._is_blocked(new, self.queued):
            self.queued.append(new)
            self.wake(new.since + self._patience_s[0])
        else:
            transmit()

    def holds(self, call: OpenCall) -> bool:
        """Return whether the call queues here."""
        return bool(self.queued) and any(queued.call is call for queued in self.queued)

    def drop(self, call: OpenCall) -> bool:
        """Drop a call on all of its ranks if it queues here; return whether it did."""
        left = [queued for queued in self.queued if queued.call is not call]
        if len(left) == len(self.queued):
            return False
        self.queued = left
        call.drop()
        return True

    def wake(self, at: float) -> None:
        """Look again at the time ``at``, if anything queues then."""
        self._wake_at = min(self._wake_at, at)

    @property
    def due(self) -> float:
        """Return when `release` is due though nothing has happened."""
        return self._wake_at if self.queued else math.inf

    def release(self) -> None:
        """Send the calls that need not queue any more, in the order in which they came."""
        if not self.queued:
            return
        queued, self.queued = self.queued, []
        for each in queued:
            if self._is_blocked(each, self.queued):
                self.queued.append(each)
            elif each.ranks:
                attempt(each.transmit, "what had queued")  # others queue behind it
        now = time.monotonic()
        times = [each.since + patience_s for each in self.queued for patience_s in self._patience_s]
        self._wake_at = min((at for at in (*times, self._wake_at) if at > now), default=math.inf)

    def _is_blocked(self, new: Unsent, before: list[Unsent]) -> bool:
        ranks, others = set(new.ranks), (other.ranks for other in before if other.mailbox == new.mailbox)
        return any(not ranks.isdisjoint(other) for other in others) or self._must_wait(new)


class OutgoingCall(msgspec.Struct, eq=False):
    """A call that is being sent: `send` does so under the turn, `fail` tells its caller why it cannot."""

    dispatcher: Dispatcher
    mesh: MeshState
    generation: int  # of the mesh; the members' ranks are meant in it
    request: CallRequest
    call: OpenCall
    output: OutputTarget | None
    message: wire.Call
    payload: Sequence[bytes]
    segment: wire.SegmentRef | None  # buffers that are too large for the payload
    waits: bool = False  # whether the mesh has to come up first (`meshbook.controller.startup`)
    _hosts: Sequence[HostState] = ()

    def send(self) -> None:
        """Expect the answers, and send the call, or have it queue."""
        mesh, request = self.mesh, self.request
        if self.waits and mesh.arrival is not None and not mesh.arrival.is_over:
            mesh.arrival.held.append(self)
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
        """Give up the call with ``error``."""
        self.dispatcher.calls.disown(self.call)
        self.call.give_up(error)

    def _transmit(self) -> None:
        """Send the call; if it has queued, this runs in the midst of other work, so it must not raise."""
        mesh, hosts = self.mesh, self._hosts
        try:
            if mesh.generation != self.generation:  # it queued while ranks got other numbers
                self.fail(stale_view(mesh))
                return
            direct, members, mailbox = self.dispatcher.direct, self.request.members, self.request.mailbox
            if not self.request.reply:
                direct.relay(mesh, mailbox, members.rank_set, 0)
                if mesh.phase not in (MeshPhase.STOPPING, MeshPhase.STOPPED):
                    hosts = list(mesh.by_host(members.ranks()))
            if self.segment is not None:
                direct.relay(mesh, mailbox, members.rank_set, self.call.id)
                self.dispatcher.payloads.send(hosts, self.message, self.payload, self.segment)
                return
            message = self.message
            if self.request.reply:
                if len(hosts) == 1 and not hosts[0].lost:
                    left = direct.send(hosts[0], mesh, self.call, message, self.payload)
                    if left is None:
                        return
                    message = left
                direct.relay(mesh, mailbox, members.rank_set, self.call.id)
            for host in hosts:
                if not host.lost:
                    host.send(message, self.payload)
        except Exception as error:
            self.fail(error)
