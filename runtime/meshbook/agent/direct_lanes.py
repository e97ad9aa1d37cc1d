"""Sockets between two workers of this host, of which one often calls the other: made here, then out of our hands.

    caller  --AskLane-->  agent                    some calls have come this way
            <-LaneOffer-  with its end of a socketpair
            --TakeLane->         --LaneOpened->  callee, with the other end
            ===== calls, cancels =====================>
            <==== answers ============================

What the caller has sent this way before `TakeLane` comes to the callee before `LaneOpened`, so order holds. We only
tell the caller when the callee is gone (`LaneLost`): what it has not answered by then it never will.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from meshbook.agent.peers import AgentPeers
from meshbook.agent.resources import HostResources
from meshbook.agent.worker import AgentWorker
from meshbook.lifecycle import WorkerPhase
from meshbook.wire import messages as wire

if TYPE_CHECKING:
    from meshbook.agent.mesh import AgentMesh

CUT_S = 1.0
"""A socket whose other end was closed is most often that of a process that ends: so long its cause is waited for."""

SEND_BYTES = 1 << 20
"""What may wait in a socket, as far as the system allows; a message counts for more than its bytes."""

_CUT = wire.DeathCause("", "its connection was closed; call again", "")


class _OfferedLane(NamedTuple):
    caller: AgentWorker
    callee: AgentWorker
    theirs: socket.socket | None
    """The callee's end, before it was sent."""


class AgentLanes:
    """Those of one host. meshes: those that have workers here."""

    def __init__(self, host: HostResources, meshes: Mapping[int, AgentMesh], peers: AgentPeers) -> None:
        self._host, self._meshes, self._peers = host, meshes, peers
        self._given: dict[int, _OfferedLane] = {}
        self._numbers = itertools.count(1)

    def offer(self, caller: AgentWorker, asked: wire.AskLane) -> None:
        """Give a worker its end of a new socket, if the other one lives here and no call to its mesh waits."""
        mesh = self._meshes.get(asked.mesh)
        if mesh is None or self._peers.must_wait(asked.mesh, is_here=mesh.is_all_here):
            return
        callee = mesh.workers.get(asked.rank)
        if callee is None or callee is caller or caller.has_ended or callee.phase is not WorkerPhase.READY:
            return
        if asked.generation != len(self._host.moves.get(asked.mesh, ())):
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return  # no descriptor is left: it goes on as before
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        number = next(self._numbers)
        self._given[number] = _OfferedLane(caller, callee, theirs)
        caller.send_mail([wire.encode(wire.LaneOffer(number, asked.mesh, asked.rank, asked.generation))], ours)

    def take(self, number: int) -> None:
        """Pass the other end on, behind what the caller has sent so far."""
        if (given := self._given.get(number)) is not None and given.theirs is not None:
            self._given[number] = given._replace(theirs=None)
            given.callee.send_mail([wire.encode(wire.LaneOpened())], given.theirs)

    def cut(self, number: int) -> None:
        """The caller has closed its end, or found it closed."""
        self._host.loop.call_later(CUT_S, lambda: self._lose(number, _CUT))

    def lose(self, worker: AgentWorker, death: wire.DeathCause) -> None:
        """A worker is gone, or answers nobody any more."""
        for number, given in tuple(self._given.items()):
            if worker in given[:2]:
                self._lose(number, death)

    def _lose(self, number: int, death: wire.DeathCause) -> None:
        if (given := self._given.pop(number, None)) is not None:
            if given.theirs is not None:
                given.theirs.close()
            if not given.caller.has_ended:
                given.caller.send_mail([wire.encode(wire.LaneLost(number, death))])
