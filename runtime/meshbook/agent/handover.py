"""A new controller has come to an agent: what it is told, and what happens to the things of the former one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from meshbook.agent.mesh import AgentMesh
from meshbook.agent.unacked import UnackedMessages
from meshbook.system.processes import is_same_process
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer

Segment = tuple[int, int]
"""(pid of the worker that owns it, number)."""


class Report(NamedTuple):
    """For the new controller, in this order."""

    hosted: wire.Hosted
    again: list[tuple[wire.FromHost, Sequence[Buffer]]]
    """Answers that the former one had acknowledged, to calls that are still open; then all it had not."""
    unneeded: set[Segment]
    """Shared memory that nobody will ask for again."""


def report(meshes: Iterable[AgentMesh], found: UnackedMessages) -> Report:
    """Put together what the new controller needs to know."""
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
    return Report(hosted, [*answers, *found.messages], lent - needed)


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
    )


class PreviousControllers:
    """Those that still run look at shared memory of our workers: it is freed when they have ended."""

    def __init__(self) -> None:
        self._holding: list[tuple[int, int, set[Segment]]] = []

    def add(self, pid: int, started: int, segments: Collection[Segment]) -> None:
        """The process ``pid`` may look at ``segments`` as long as it runs."""
        if segments:
            self._holding.append((pid, started, set(segments)))

    def take_freed(self) -> set[Segment]:
        """What those have left that have ended since."""
        freed: set[Segment] = set()
        for each in tuple(self._holding):
            if not is_same_process(each[0], each[1]):
                self._holding.remove(each)
                freed |= each[2]
        return freed
