"""The report that a new controller gets from an agent: its meshes, and what the former one has not acknowledged."""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshbook.agent.journal import without_value
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
