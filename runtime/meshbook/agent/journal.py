"""The journal of a mesh on one host: its workers and its calls, for the next controller.

A call matters to the next controller while a rank is at it, or while an answer has not been acknowledged, on any host.
Answers that were acknowledged are kept as well, within bounds: the call may still be open elsewhere, and its earlier
answers have gone with the controller that got them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

import msgspec

from meshbook.formatting import format_bytes
from meshbook.shape.members import Moves
from meshbook.wire import messages as wire

KEPT_ENDED_CALLS = 256
KEPT_REPLY_BYTES = 1 << 20  # a larger answer is not kept once it was acknowledged
KEPT_BYTES = 16 << 20
LABEL_CHARS = 80


class RememberedCall(msgspec.Struct):
    """A call that came to this host."""

    id: int
    label: str
    target: wire.Target
    output: int
    mailbox: int
    waiting: set[int]  # the ranks here that have not answered; kept up to date by its owner
    replies: dict[int, tuple[wire.RankReply, Sequence[bytes]]] = {}
    size_bytes: int = 0
    direct: int = 0  # see `meshbook.wire.messages.calls.Call`
    is_over: bool = False  # whether a rank has forgotten it, since the controller had all answers

    def keep(self, reply: wire.RankReply, frames: Sequence[bytes]) -> None:
        """Note an answer that is sent."""
        size = len(reply.inline) + sum(map(len, frames))
        if reply.bulk is None and size <= KEPT_REPLY_BYTES:
            self.size_bytes += size
            self.replies[reply.rank] = (reply, frames)
        else:
            gone = f"its value ({format_bytes(size)}) had gone to the controller that ended"
            self.replies[reply.rank] = (without_value(reply, gone), ())


def without_value(reply: wire.RankReply, why: str) -> wire.RankReply:
    """Return the reply that says that a value was not kept."""
    return wire.RankReply(reply.rank, wire.GONE, 0, reply.duration_s, None, inline=why.encode())


class CallJournal:
    """The journal of one mesh on one host."""

    def __init__(self, id: int, name: str) -> None:
        self.id, self.name = id, name
        self.spawn: wire.Spawn | None = None  # the last one: how workers are started
        self.arrangement: wire.Arrangement | None = None
        self.moves: Moves = ()  # how its ranks got other numbers
        self._lost: dict[int, tuple[wire.WorkerExited, wire.WorkerStarted]] = {}
        self._open: dict[int, RememberedCall] = {}
        self._ended: OrderedDict[int, RememberedCall] = OrderedDict()
        self._ended_bytes = 0

    def on_spawn(self, spawn: wire.Spawn) -> None:
        """Note that workers are asked for."""
        self.spawn = spawn
        if self.arrangement is None or all(seat.known_as == seat.rank for seat in spawn.seats):
            self.arrangement = spawn.arrangement  # else it is one that the mesh is to have, if all goes well
        for seat in spawn.seats:
            self._lost.pop(seat.known_as, None)

    def is_resized_by(self, renumber: wire.Renumber) -> bool:
        """Whether it changes the mesh; else only the store of its process groups has another home, and calls go on."""
        is_same = renumber.arrangement == self.arrangement and renumber.moves == self.moves
        return not is_same or any(seat.known_as != seat.rank for seat in renumber.seats)

    def on_renumber(self, renumber: wire.Renumber) -> None:
        """Follow ranks to other numbers; no call is open if any rank gets one."""
        if self.is_resized_by(renumber):
            self._open.clear()
            self._ended.clear()
            self._ended_bytes = 0
        self.arrangement, self.moves = renumber.arrangement, renumber.moves
        seats = [seat for seat in renumber.seats if seat.known_as in self._lost]
        self._lost = {
            seat.rank: (exited, worker._replace(rank=seat.rank))
            for seat in seats
            for exited, worker in [self._lost[seat.known_as]]
        }

    def on_retire(self, ranks: Collection[int]) -> None:
        """Forget the deaths of ranks that were told to leave."""
        for rank in ranks:
            self._lost.pop(rank, None)

    def on_lost(self, exited: wire.WorkerExited, device: str, log_path: str) -> None:
        """Note that a worker ended without being told to."""
        self._lost[exited.rank] = (exited, wire.WorkerStarted(exited.rank, exited.pid, device, log_path))

    def on_call(self, call: wire.Call, waiting: set[int]) -> RememberedCall:
        """Note a call; ``waiting`` shrinks as ranks answer. Return the record for its answers."""
        if (before := self._ended.pop(call.id, None)) is not None:  # other ranks have answered it
            self._ended_bytes -= before.size_bytes
            before.waiting |= waiting
            self._open[call.id] = before
            return before
        remembered = self._open[call.id] = RememberedCall(
            call.id, call.label[:LABEL_CHARS], call.target, call.output, call.mailbox, waiting, direct=call.direct
        )
        return remembered

    def knows(self, id: int) -> bool:
        """Whether a call has come, as far as the journal goes."""
        return id in self._open or id in self._ended

    def on_ended(self, id: int) -> None:
        """Note that every rank here has answered a call, or is gone."""
        call = self._open.pop(id, None)
        if call is None:
            return
        self._ended[id] = call
        self._ended_bytes += call.size_bytes
        while len(self._ended) > KEPT_ENDED_CALLS or self._ended_bytes > KEPT_BYTES:
            self._ended_bytes -= self._ended.popitem(last=False)[1].size_bytes

    def exit_of(self, rank: int) -> wire.WorkerExited | None:
        """Return the end of a rank that has not been started again."""
        return self._lost[rank][0] if rank in self._lost else None

    # ---- for the next controller --------------------------------------------------------------------------------

    @property
    def dead(self) -> tuple[wire.WorkerStarted, ...]:
        """Return the workers that had the dead ranks."""
        return tuple(worker for _, worker in self._lost.values())

    def lost(self, still_to_be_told: Collection[int]) -> tuple[wire.LostRank, ...]:
        """Return the dead ranks whose end was acknowledged. still_to_be_told: pids of workers whose end was not."""
        return tuple(
            wire.LostRank(rank, exited.cause, exited.log_tail)
            for rank, (exited, _) in self._lost.items()
            if exited.pid not in still_to_be_told
        )

    def calls(self, unacknowledged: Collection[tuple[int, int]]) -> tuple[wire.CallState, ...]:
        """Return the calls that may matter. unacknowledged: (call, rank) of answers that are sent again anyway."""
        states = []
        spans_hosts = self.arrangement is not None and self.arrangement.hosts > 1
        for call in (*self._ended.values(), *self._open.values()):
            unsure = any((call.id, rank) in unacknowledged for rank in call.replies)
            if (call.waiting or unsure or spans_hosts) and not self._is_over(call):
                states.append(
                    wire.CallState(
                        call.id, call.label, call.target, call.output, tuple(call.waiting), tuple(call.replies),
                        bool(call.waiting) or unsure, call.mailbox,
                    )
                )  # fmt: skip
        return tuple(states)

    def _is_over(self, call: RememberedCall) -> bool:
        """Whether the controller that ended had all answers to a call that went past us. A rank that has told us
        nothing of it got a later one past us, which happens only then."""
        return call.is_over or (
            call.direct != 0
            and any(
                later.direct > call.direct and not call.waiting.isdisjoint((*later.waiting, *later.replies))
                for later in (*self._ended.values(), *self._open.values())
            )
        )

    def acknowledged_replies(
        self, unacknowledged: Collection[tuple[int, int]], lent: Collection[tuple[int, int]]
    ) -> Iterator[tuple[wire.Replies, Sequence[bytes]]]:
        """Yield answers to send once more, since the controller that acknowledged them has ended. lent: (pid, segment)
        of payloads in shared memory that are still unchanged."""
        told = {call.id for call in self.calls(unacknowledged)}
        for call in (*self._ended.values(), *self._open.values()):
            for rank, (reply, frames) in call.replies.items() if call.id in told else ():
                if (call.id, rank) in unacknowledged:
                    continue
                segment = reply.segment
                if segment is not None and (segment.pid, segment.segment) not in lent:
                    reply, frames = without_value(reply, "its value had been freed by the controller that ended"), ()
                yield wire.Replies(call.id, (reply,)), frames
