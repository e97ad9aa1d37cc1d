"""The resources that the parts of one agent share, and its counts of payloads in shared memory.

`meshbook.agent.host_agent.HostAgent` makes them once. A payload is counted while workers of the host look at it, or
connections send it, until the last of them has let go of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from meshbook.agent.worker import AgentWorker
from meshbook.shape.members import Moves
from meshbook.system.event_loop import EventLoop
from meshbook.system.exits import OomWatch
from meshbook.values.segments import SegmentPool, map_segment
from meshbook.wire import messages as wire
from meshbook.wire.connection import Spans
from meshbook.wire.link import Link, Uplink
from meshbook.wire.ticket import Ticket
from meshbook.wire.transport import Dialer

KEPT_OUTPUT_BYTES = 16 << 20  # of all meshes of the host; the logs have the rest
KEPT_RESULT_BYTES = 1 << 30  # of all meshes of the host, payloads in the shared memory of workers included


class OfflineQuota:
    """The amounts of output and results kept while no controller listens."""

    def __init__(self) -> None:
        self.listening = True
        self._output_bytes = self._result_bytes = 0

    def begin(self) -> None:
        """Begin to count: no controller listens any more."""
        self.listening = False
        self._output_bytes = self._result_bytes = 0

    def end(self) -> None:
        """Count no more: a controller listens again."""
        self.listening = True

    def output(self, size_bytes: int) -> bool:
        """Whether to send output, or keep it; False: it must be cut."""
        if self.listening:
            return True
        self._output_bytes += size_bytes
        return self._output_bytes <= KEPT_OUTPUT_BYTES

    def result(self, size_bytes: int) -> bool:
        """Whether to send a result, or keep it; False: the value must go, and the reply says so."""
        if self.listening:
            return True
        self._result_bytes += size_bytes
        return self._result_bytes <= KEPT_RESULT_BYTES


@dataclass(frozen=True)
class HostResources:
    """The resources that the meshes of one host, its mail and its peers share."""

    name: str
    ticket: Ticket
    loop: EventLoop
    dialer: Dialer
    uplink: Uplink  # to the controller
    segment_refs: SegmentRefCounts
    pool: SegmentPool  # the agent's own shared memory
    moves: Mapping[int, Moves]  # moves of meshes whose ranks got other numbers
    quota: OfflineQuota = field(default_factory=OfflineQuota)
    oom: OomWatch = field(default_factory=OomWatch)


LentSegment: TypeAlias = tuple[int, int]  # (pid of its owner, number)


class SegmentRefCounts:
    """The holders of payloads on one host; ``on_unused(pid, segment)`` is called when a segment has none any more."""

    def __init__(self, on_unused: Callable[[int, int], None]) -> None:
        self._on_unused = on_unused
        self._holders: dict[LentSegment, int] = {}
        self.sent: deque[LentSegment] = deque()  # segments of which the other end has all pieces, or never will

    def lend(self, key: LentSegment, workers: Iterable[AgentWorker] = ()) -> None:
        """Count workers that are about to get a segment; without any we hold it ourselves, until `end`."""
        holders = list(workers)
        self._holders[key] = self._holders.get(key, 0) + (len(holders) or 1)
        for worker in holders:
            worker.segments.add(key)

    def end(self, key: LentSegment) -> None:
        """Note that one holder has let go."""
        left = self._holders.get(key, 0) - 1
        if left > 0:
            self._holders[key] = left
        elif left == 0:
            del self._holders[key]
            self._on_unused(*key)

    def export(self, segment: wire.SegmentRef, link: Link) -> tuple[wire.SegmentRef | None, tuple[int, Spans] | None]:
        """Make a worker's payload reachable at the other end: as it is, or in pieces. Raises: MeshError."""
        if link.shares_memory:
            return segment, None
        key = (segment.pid, segment.segment)
        self.lend(key)  # held until the last view of it has died
        return None, link.send_payload([each.data for each in map_segment(segment, lambda _: self.sent.append(key))])

    def settle(self) -> None:
        """Let go of segments that have been sent, once per turn of the agent's loop. Views may die on any thread."""
        while self.sent:
            self.end(self.sent.popleft())

    def take_back(self, worker: AgentWorker, key: LentSegment) -> None:
        """Note that a worker has let go of a segment."""
        if key in worker.segments:
            worker.segments.discard(key)
            self.end(key)
