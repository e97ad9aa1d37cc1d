"""Sockets to other ranks of this host, by which calls need not go by the agent (`meshbook.agent.mail`).

A process has a lane to each rank that it often calls, and uses it for calls of one rank whose arguments are small.
Answers come back on it, except large ones and those behind a print, which the agent passes on.
Messages of one sender come in the order of sending:

    agent, then lane    `TakeLane` goes by the agent, and the callee has its end of the lane behind all that went before
    lane, then agent    the callee looks at its lanes when mail has come, before it hands that out; the lane is used no
                        more, and later there may be another one

Calls that are open when the callee is gone are answered for when the agent says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import traceback
from collections.abc import Callable, Sequence

import msgspec

from meshbook.concurrency import forks
from meshbook.errors import PeerProtocolError
from meshbook.system.descriptors import open_above
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer, MessageSocket, pack
from meshbook.wire.replies import lost_replies
from meshbook.worker.channel import AgentChannel
from meshbook.worker.mail_turn import MailTurn

ASK_AFTER = 16  # calls of one rank before a lane to it is asked for
MAX_LANES = 64  # of one process, to others
KEPT_TARGETS = 256
LOOK_S = 0.05  # a caller that waits for room looks so often for interrupts


class RankLane:
    """An end of a lane. The reader of the mail calls ``on_message``, and once ``on_end``, unless it is closed here."""

    def __init__(
        self,
        fd: int,
        turn: MailTurn,
        on_message: Callable[[RankLane, list[bytes]], None],
        on_end: Callable[[RankLane], None],
    ) -> None:
        self.offer: wire.LaneOffer | None = None  # None: it is the callee's end
        self._messages = MessageSocket(socket.socket(fileno=fd))
        self._turn, self._on_message, self._on_end = turn, on_message, on_end
        self._lock = threading.Lock()
        self.is_open = True
        turn.watch(fd, self.serve)

    def send(self, data: bytes) -> bool:
        """Send a message, as soon as there is room; False: the lane is closed. Any thread; within a shield."""
        with self._lock:
            if not self.is_open:
                return False
            try:
                if not self._messages.send(data):
                    self._turn.want_writable(self._messages.fd, True)
                    self._turn.hand_back()
            except OSError:
                pass  # the other end is gone: who reads finds out, and the agent says why
        return True

    @property
    def is_full(self) -> bool:
        """Whether something waits for the other end to read."""
        return self._messages.unsent_bytes > 0 and self.is_open

    def wait_for_room(self) -> None:
        """Wait a moment for room."""
        room = select.poll()
        room.register(self._messages.fd, select.POLLOUT)
        room.poll(LOOK_S * 1000)

    def flush(self) -> None:
        """Send waiting messages, as far as there is room. Any thread; within a shield."""
        with self._lock:
            if self.is_open:
                try:
                    if self._messages.flush():
                        self._turn.want_writable(self._messages.fd, False)
                except OSError:
                    pass  # as in `send`

    def serve(self) -> None:
        """Send waiting messages, and take in all that are there."""
        if self._messages.unsent_bytes:
            self.flush()
        while self.is_open:
            try:
                for frames in self._messages.receive():
                    self._on_message(self, frames)
            except (OSError, EOFError, IndexError, PeerProtocolError, *wire.MALFORMED):
                self.close()
                self._on_end(self)
                return
            if not self._messages.has_more:
                return

    def close(self, may_close: Callable[[], bool] = lambda: True) -> None:
        """Close the lane; the reader of the mail calls it. may_close: asked when no message is being sent."""
        with self._lock:
            if self.is_open and may_close():
                self.is_open = False
                self._turn.forget(self._messages.fd)
                self._messages.close()

    def abandon(self) -> None:
        """Close the parent's descriptor in a forked child."""
        self.is_open = False
        self._messages.close()


class RankLanes:
    """The lanes of one process. deliver: takes a call, or a cancel of one. answer: takes answers to our calls."""

    def __init__(
        self,
        channel: AgentChannel,
        turn: MailTurn,
        identity: Callable[[], wire.Identity],
        deliver: Callable[[RankLane, wire.Call | wire.Cancel, list[bytes]], None],
        answer: Callable[[wire.Replies, Sequence[bytes]], None],
    ) -> None:
        self._channel, self._turn, self._identity = channel, turn, identity
        self._deliver, self._answer = deliver, answer
        self.origin: wire.Origin | None = None  # our name on our lanes; None before there is any
        self._lanes: dict[int, RankLane] = {}  # lanes to others, by the numbers of their offers
        # the lanes that calls go by, by mesh, rank and generation
        self._used: dict[tuple[int, int, int], RankLane] = {}
        self._others: set[RankLane] = set()  # lanes of other ranks that call us
        self._left: list[RankLane] = []  # lanes that are used no more
        self.open: dict[int, RankLane] = {}  # lanes of calls that were sent there and not answered, by id
        self._counts: dict[tuple[int, int, int], int] = {}  # numbers of calls to one rank that went by the agent
        self._single: dict[wire.Target, int] = {}  # the rank of targets that have only one, -1 of others
        self._choosing = threading.Lock()  # held to choose a way that is not a lane, and to begin to use one
        self._generation = forks.generation

    # ---- any thread -----------------------------------------------------------------------------------------------

    def send(self, call: wire.Call, payload: Sequence[Buffer]) -> None:
        """Send a call by its lane, if there is one, else by the agent."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        rank = -1 if call.segment is not None else self._single.get(call.target, -2)
        if rank == -2:
            if len(self._single) >= KEPT_TARGETS:
                self._single.clear()
            ranks = [rank for part in call.target for rank in part.ranks()]
            rank = self._single[call.target] = ranks[0] if len(ranks) == 1 else -1
        way = (call.mesh, rank, call.generation)
        if (lane := self._used.get(way)) is not None and self._send_by(lane, call, payload):
            return
        with self._choosing:
            lane = self._used.get(way)
            if lane is None:
                self._send_by_agent(way, call, payload)
        if lane is not None:  # it has just been opened
            self.send(call, payload)

    def _send_by(self, lane: RankLane, call: wire.Call, payload: Sequence[Buffer]) -> bool:
        """Send a call by a lane, and wait for room, so that no other overtakes it; False: the lane was closed."""
        data = pack([wire.encode(call), *payload])
        with self._channel.shield:
            if call.reply:
                self.open[call.id] = lane
            if not lane.send(data):
                self._forget(lane)
                return call.reply and self.open.pop(call.id, None) is None  # it was answered for already
        while lane.is_full and threading.get_ident() != self._turn.reader:
            lane.wait_for_room()
            with self._channel.shield:
                lane.flush()
        return True

    def _send_by_agent(self, way: tuple[int, int, int], call: wire.Call, payload: Sequence[Buffer]) -> None:
        _, rank, _ = way
        if rank < 0:
            for other, lane in list(self._used.items()):
                if other[0] == call.mesh and wire.target_has(call.target, other[1]):
                    self._forget(lane)  # else what goes by it next might overtake this
        self._channel.send(call, payload)
        if rank < 0 or not call.mesh:
            return
        count = self._counts[way] = self._counts.get(way, 0) + 1
        if count == ASK_AFTER and len(self._used) < MAX_LANES:
            self._channel.send(wire.AskLane(*way))

    def cancel(self, cancel: wire.Cancel) -> bool:
        """Cancel a call of ours; return False if it went by the agent."""
        if (lane := self.open.get(cancel.call)) is None:
            return False
        with self._channel.shield:
            lane.send(pack([wire.encode(msgspec.structs.replace(cancel, origin=self.origin))]))
        return True

    def _forget(self, lane: RankLane) -> None:
        """Use a lane no more; it is closed when all calls that went by it are answered."""
        for way in [way for way, used in list(self._used.items()) if used is lane]:
            self._used.pop(way, None)
            self._counts.pop(way, None)
            self._left.append(lane)

    # ---- whoever reads the mail -------------------------------------------------------------------------------------

    def on_offer(self, offer: wire.LaneOffer) -> None:
        """Open the lane to a rank that is often called."""
        lane = RankLane(self._take_descriptor(), self._turn, self._on_answer, self._on_end)
        lane.offer, here = offer, self._identity()
        self._lanes[offer.number] = lane
        for (mesh, _, generation), used in list(self._used.items()):
            if mesh == offer.mesh and generation != offer.generation:
                self._forget(used)
        self._close_left()
        self.origin = self.origin or wire.Origin(here.mesh, here.rank, os.getpid())
        with self._choosing:
            self._channel.send(wire.TakeLane(offer.number))
            self._used[offer.mesh, offer.rank, offer.generation] = lane

    def on_opened(self) -> None:
        """Open the lane of a rank that calls us."""
        lane = RankLane(self._take_descriptor(), self._turn, self._on_call, self._others.discard)
        self._others.add(lane)
        self._channel.frames.on_taken = self._turn.serve_others

    def _take_descriptor(self) -> int:
        assert self._channel.frames.descriptors is not None
        came = self._channel.frames.descriptors.popleft()
        kept = open_above(lambda: os.dup(came))  # user code may have closed its stdout, which it would be
        os.close(came)
        return kept

    def _close_left(self) -> None:
        """Close the lanes that are used no more, and by which no answer is to come."""
        for lane in tuple(self._left):
            was_open = lane.is_open
            lane.close(lambda: lane not in self.open.values())  # noqa: B023 -- it is called at once
            if not lane.is_open:
                self._left.remove(lane)
            if was_open and not lane.is_open and lane.offer is not None:
                del self._lanes[lane.offer.number]
                self._channel.send(wire.CutLane(lane.offer.number))

    def on_lost(self, lost: wire.LaneLost) -> None:
        """Answer for the calls that were sent by a lane and not answered."""
        if (lane := self._lanes.get(lost.number)) is None:
            return
        lane.serve()  # what it has answered before
        lane.close()
        self._forget(lane)
        del self._lanes[lost.number]
        assert lane.offer is not None
        for id in [id for id, way in list(self.open.items()) if way is lane]:
            self.open.pop(id, None)
            self._answer(lost_replies(id, [(lane.offer.rank, lost.death)], None), ())

    def _on_end(self, lane: RankLane) -> None:
        """Note that the other end was closed."""
        assert lane.offer is not None
        self._forget(lane)
        with contextlib.suppress(BrokenPipeError):  # the agent is gone as well
            self._channel.send(wire.CutLane(lane.offer.number))

    def _on_call(self, lane: RankLane, frames: list[bytes]) -> None:
        message = wire.decode_between_workers(frames[0])
        if isinstance(message, wire.Reply):
            raise PeerProtocolError("an answer to no call")
        self._deliver(lane, message, frames[1:])

    def _on_answer(self, lane: RankLane, frames: list[bytes]) -> None:
        reply = wire.decode_between_workers(frames[0])
        if not isinstance(reply, wire.Reply) or lane.offer is None:
            raise PeerProtocolError("a call by a lane of ours")
        if self.open.pop(reply.id, None) is not None:
            told = wire.RankReply(
                lane.offer.rank, reply.status, len(frames) - 1, reply.duration_s, None, None, reply.inline
            )
            try:
                self._answer(wire.Replies(reply.id, (told,)), frames[1:])
            except Exception:
                traceback.print_exc()  # a fault of ours, or of a hook: it costs this answer, not the lane
        if self._left:
            self._close_left()

    def name(self, message: wire.Replies) -> wire.Replies:
        """Return the agent's answer to a call of ``open``, with the number by which that meant the rank."""
        lane = self.open.pop(message.id)
        assert lane.offer is not None
        replies = tuple(reply._replace(rank=lane.offer.rank) for reply in message.replies)
        return wire.Replies(message.id, replies, message.origin)

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child."""
        for lane in (*self._lanes.values(), *self._others):
            lane.abandon()
