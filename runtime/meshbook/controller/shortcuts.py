"""The choice of calls that go past the agent (`meshbook.wire.shortcuts`), and what the agent knows. Under the turn.

A call that goes there may overtake messages that are on their way by the agent. So only a call goes there that meets
nothing: none of its ranks has another call to answer, and no message without an answer may be on its way to a mailbox
there. Before any later message the host hears of the calls that went past it (`HostLink.deferred`). A call to several
ranks is one datagram to each, of the same bytes; until all have answered, none of them gets another call past the
agent: else the agent, which may be told of the call after that, would not get the answer of a rank that has given it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.table import CallTable
from meshbook.controller.host_state import HostState
from meshbook.controller.mesh_state import MeshState
from meshbook.wire import messages as wire
from meshbook.wire.shortcuts import DEFER_S

# a call to more goes by the agent: Linux queues 10 datagrams for a socket (net.unix.max_dgram_qlen), so of more answers
# at a time some would go by the agent after all. Measured: 12 ranks 0.7 times as long so, 16 ranks 1.5 times
MOST_RANKS = 12
KEPT_NAMES = 256  # names of calls with large answers
LOOK_AT = 8  # with more open calls than that, it is not looked which ranks have them


class _RankLane(NamedTuple):
    """A rank's main thread, or its mailboxes, as the end of a shortcut."""

    mesh: int
    rank: int
    is_mail: bool


class Shortcuts:
    """The shortcuts of all meshes."""

    def __init__(self, calls: CallTable, next_id: Callable[[], int], send: Callable[[bytes, str], bool]) -> None:
        """send: sends a datagram to an address; returns False if it cannot go there."""
        self._calls, self._next_id, self._send = calls, next_id, send
        self._addresses: dict[_RankLane, str] = {}
        # the last answered call on each lane, which the rank keeps until it hears that we have the answer
        self._unheard: dict[_RankLane, int] = {}
        self._spread: dict[int, frozenset[int]] = {}  # the ranks of open calls to several, by call
        # (mesh, name) of calls to several ranks with answers that had to go by the agent, so it is to have them first
        self._large: set[tuple[int, str]] = set()
        self._casts: dict[int, int] = {}  # how many messages without an answer were sent, by mesh
        # how many of them a rank has read, as an answer to a later call has shown
        self._read: dict[_RankLane, int] = {}
        self._deferring: set[HostState] = set()  # hosts that may have `HostLink.deferred`
        self.due = math.inf  # when `expire` has something to do

    def send(self, host: HostState, mesh: MeshState, call: OpenCall, message: wire.Call) -> wire.Call | None:
        """Send a call of one host past it; return None, or the message to send by the host."""
        ranks = call.waiting
        if len(ranks) > MOST_RANKS or message.output or len(self._calls.ids) > LOOK_AT or host.backlog:
            return message
        for other in self._calls.open_now:
            busy = self._spread.get(other.id, other.waiting)
            if other.mesh == mesh.id and other is not call and not ranks.isdisjoint(busy):
                return message
        if len(ranks) > 1 and (mesh.id, call.what) in self._large:
            return message
        is_mail = call.mailbox != 0
        lanes = [_RankLane(mesh.id, rank, is_mail) for rank in ranks]
        if is_mail and mesh.id in self._casts and not self._have_read_casts(lanes, call):
            return message
        message = msgspec.structs.replace(message, shortcut=self._next_id(), generation=mesh.generation)
        if not self._addresses.keys() >= set(lanes):
            return message
        if len(lanes) > 1:
            self._spread[call.id] = frozenset(ranks)
            call.when_ended(partial(self._on_spread_ended, call, lanes))
        data = wire.encode(message)
        for lane in lanes:
            if not self._send(data, self._addresses[lane]):
                del self._addresses[lane]
                return message  # those that have it already do not run it twice
        self._defer(host, call, message)
        return None

    def _on_spread_ended(self, call: OpenCall, lanes: Sequence[_RankLane]) -> None:
        """Note that all ranks of a call have answered, or will not, and acknowledge the answers."""
        del self._spread[call.id]
        self._unheard.update(dict.fromkeys(lanes, call.id))
        for head, buffers in call.results.raw.values():
            if buffers or len(head) > wire.INLINE_MAX_BYTES:
                if len(self._large) >= KEPT_NAMES:
                    self._large.clear()
                self._large.add((call.mesh, call.what))
                return

    def note_cast(self, mesh: MeshState) -> None:
        """Count a message without an answer to mailboxes of ``mesh``."""
        self._casts[mesh.id] = self._casts.get(mesh.id, 0) + 1

    def _have_read_casts(self, lanes: Sequence[_RankLane], call: OpenCall) -> bool:
        """Whether ranks have read all messages without an answer; else ``call``, sent behind them, will show it."""
        sent = self._casts[call.mesh]
        have_read = True

        def note(lane: _RankLane) -> None:
            if lane.rank in call.results.raw:
                self._read[lane] = sent

        for lane in lanes:
            if self._read.get(lane) != sent:
                call.when_ended(partial(note, lane))
                have_read = False
        return have_read

    # ---- what the agent must know -----------------------------------------------------------------------------------

    def _defer(self, host: HostState, call: OpenCall, message: wire.Call) -> None:
        """Tell the host of a call when it is not answered soon."""
        self._deferring.add(host)
        is_first = True
        for each in self._deferring:
            each.deferred = [deferred for deferred in each.deferred if deferred[0]]
            is_first = is_first and not each.deferred
        host.deferred.append((call.waiting, message))
        due = time.monotonic() + DEFER_S
        self.due = due if is_first else min(self.due, due)

    def expire(self, now: float) -> None:
        """Take the steps that are due."""
        if now >= self.due:
            for host in self._deferring:
                host.send_deferred()
            self._deferring.clear()
            self.due = math.inf

    # ---- what ranks say ---------------------------------------------------------------------------------------------

    def on_datagram(self, data: bytes, address: str) -> None:
        """Take a datagram that a rank has sent past its agent. Raises: the errors of `wire.MALFORMED`."""
        message = wire.decode_past_agent(data)
        if isinstance(message, wire.ShortcutOpened):
            self._addresses[_RankLane(message.mesh, message.rank, message.is_mail)] = address
        elif isinstance(message, wire.Replies) and (call := self._calls.find(message.id)) is not None:
            for reply in message.replies:
                if reply.rank in call.waiting and not (reply.frames or reply.segment or reply.bulk):
                    if len(call.members.rank_set) == 1:  # else all are told when the last has answered
                        self._unheard[_RankLane(call.mesh, reply.rank, call.mailbox != 0)] = call.id
                    self._calls.answer(call, message, (), ((),))

    def acknowledge(self) -> None:
        """Tell the ranks that their answers have come; a next call would have told them so too."""
        for lane, call in self._unheard.items():
            if (address := self._addresses.get(lane)) is not None:
                self._send(wire.encode(wire.Heard(call)), address)
        self._unheard.clear()

    def forget(self, mesh: int) -> None:
        """Forget a mesh that has ended."""
        self._casts.pop(mesh, None)
        for lane in [lane for lane in {*self._addresses, *self._read, *self._unheard} if lane.mesh == mesh]:
            self._addresses.pop(lane, None)
            self._read.pop(lane, None)
            self._unheard.pop(lane, None)
