"""The memory of an agent for the next controller: its journal of each mesh, and the report that a new controller gets.

A call matters to the next controller while a rank is at it, or while an answer has not been acknowledged, on any host.
Answers that were acknowledged are kept as well, within bounds: the call may still be open elsewhere, and its earlier
answers have gone with the controller that got them.
"""

from __future__ import annotations

import select
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshbook.formatting import format_bytes
from meshbook.shape.members import Moves
from meshbook.system.processes import is_same_process
from meshbook.wire import messages as wire
from meshbook.wire.connection import PayloadPiece, Sent
from meshbook.wire.frames import Buffer
from meshbook.wire.replies import split_replies

if TYPE_CHECKING:
    from meshbook.agent.mesh import AgentMesh

HEAR_S = 1.0  # a new controller waits so long for ranks to tell which calls of the former one came past their agent

Segment = tuple[int, int]  # (pid of the worker that owns it, number)


# answers to requests of the former controller, and its view of meshes: the next one gets a report instead. Also calls
# to mailboxes of its process: the next one has others
_OF_THE_OLD = (
    wire.MeshReady, wire.SpawnProgress, wire.SpawnFailed, wire.MeshStopped, wire.Hosted, wire.Call, wire.Cancel,
)  # fmt: skip


class UnackedMessages(NamedTuple):
    """The messages to send again, in order, with their contents."""

    messages: list[tuple[wire.FromHost, Sequence[Buffer]]]
    pieces: list[PayloadPiece]  # pieces of payloads that cross hosts; whole payloads only
    replies: set[tuple[int, int]]  # (call, rank) of the answers among the messages
    exits: set[int]  # pids of the workers whose end is among them
    segments: set[tuple[int, int]]  # (pid, segment) of payloads in shared memory that they name


def unacked_messages(calls: Sequence[Sent], pieces: Sequence[PayloadPiece]) -> UnackedMessages:
    """Sort the messages and the pieces of payloads that the former controller has not acknowledged."""
    whole = {piece.payload for piece in pieces if piece.offset == 0}
    found = UnackedMessages([], [piece for piece in pieces if piece.payload in whole], set(), set(), set())
    for header, payload in calls:
        message = wire.decode_from_host(header)
        if isinstance(message, _OF_THE_OLD) or (isinstance(message, wire.Replies) and not message.replies):
            continue
        if isinstance(message, wire.Replies):
            message, payload = _checked(message, payload, whole)
            found.replies.update((message.id, reply.rank) for reply in message.replies)
            found.segments.update(
                (reply.segment.pid, reply.segment.segment) for reply in message.replies if reply.segment
            )
        elif isinstance(message, wire.WorkerExited):
            found.exits.add(message.pid)
        found.messages.append((message, payload))
    return found


def _checked(message: wire.Replies, frames: Sequence[Buffer], whole: set[int]) -> tuple[wire.Replies, Sequence[Buffer]]:
    """Return replies without values of which a part has gone to the former controller."""
    replies: list[wire.RankReply] = []
    kept: list[Buffer] = []
    for reply, mine in split_replies(message, frames):
        if reply.bulk is not None and reply.bulk[0] not in whole:
            replies.append(without_value(reply, "its value was on its way to the controller that ended"))
        else:
            replies.append(reply)
            kept += mine
    return wire.Replies(message.id, tuple(replies)), kept


def hear_out(meshes: Iterable[AgentMesh]) -> None:
    """Take in the workers' messages until each has told which calls came past us: the next controller is to know them.
    A worker that is stopped, or whose native code keeps the interpreter, is waited for `HEAR_S` and no longer."""
    asked = [worker for mesh in meshes for worker in mesh.workers.values()]
    end = time.monotonic() + HEAR_S
    while (silent := [worker for worker in asked if worker.may_tell]) and (left_s := end - time.monotonic()) > 0:
        arrivals = select.poll()
        for worker in silent:
            for lane in (worker.calls, worker.mail):
                arrivals.register(lane.fd, select.POLLIN)
        arrivals.poll(1000 * left_s)
        for worker in silent:
            worker.calls.read_waiting()
            worker.mail.read_waiting()


def report(
    meshes: Iterable[AgentMesh], found: UnackedMessages
) -> tuple[wire.Hosted, list[tuple[wire.FromHost, Sequence[Buffer]]], set[Segment]]:
    """Put together the report for the new controller. Returns: the report; answers that the former one had acknowledged
    to calls that are open, then all it had not; and shared memory that will not be asked for again."""
    known = [mesh for mesh in meshes if mesh.memory.spawn is not None and not mesh.worker_pool.ending]
    lent = {(worker.pid, segment) for mesh in known for worker in mesh.workers.values() for segment in worker.lent}
    answers = [each for mesh in known for each in mesh.memory.acknowledged_replies(found.replies, lent)]
    needed = found.segments | {
        (reply.segment.pid, reply.segment.segment)
        for replies, _ in answers
        for reply in replies.replies
        if reply.segment is not None
    }
    hosted = wire.Hosted(tuple(_describe(mesh, found) for mesh in known))
    return hosted, [*answers, *found.messages], lent - needed


def _describe(mesh: AgentMesh, found: UnackedMessages) -> wire.HostedState:
    memory = mesh.memory
    spawn, arrangement = memory.spawn, memory.arrangement
    assert spawn is not None
    assert arrangement is not None
    return wire.HostedState(
        mesh=mesh.id,
        name=memory.name,
        arrangement=arrangement,
        device=spawn.device,
        preload=spawn.preload,
        cwd=spawn.cwd,
        sys_path=spawn.sys_path,
        ranks=tuple(mesh.worker_pool.logs),
        workers=(*mesh.worker_pool.describe(), *memory.dead),
        lost=memory.lost(found.exits),
        calls=memory.calls(found.replies),
        moves=memory.moves,
        torch=spawn.torch,
    )


class PreviousControllers:
    """The former controllers that still look at shared memory of our workers: it is freed when they end."""

    def __init__(self) -> None:
        self._holding: list[tuple[int, int, set[Segment]]] = []

    def add(self, pid: int, started: int, segments: Collection[Segment]) -> None:
        """Note that the process ``pid`` may look at ``segments`` as long as it runs."""
        if segments:
            self._holding.append((pid, started, set(segments)))

    def take_freed(self) -> set[Segment]:
        """Return the segments of controllers that have ended since the last call."""
        freed: set[Segment] = set()
        for each in tuple(self._holding):
            if not is_same_process(each[0], each[1]):
                self._holding.remove(each)
                freed |= each[2]
        return freed


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
