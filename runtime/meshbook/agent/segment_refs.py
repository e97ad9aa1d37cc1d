"""Payloads in shared memory that workers of a host look at, and connections, until the last of them has let go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from meshbook.agent.worker import AgentWorker
from meshbook.values.segments import map_segment
from meshbook.wire import messages as wire
from meshbook.wire.bulk import Spans
from meshbook.wire.frames import Buffer
from meshbook.wire.host_link import HostLink
from meshbook.wire.uplink import Uplink

LentSegment: TypeAlias = tuple[int, int]
"""(pid of its owner, number)."""


class SegmentRefCounts:
    """Of one host; ``on_unused(pid, segment)`` is called when nobody has a segment any more."""

    def __init__(self, on_unused: Callable[[int, int], None]) -> None:
        self._on_unused = on_unused
        self._holders: dict[LentSegment, int] = {}
        self.sent: deque[LentSegment] = deque()
        """Segments of which the other end has all pieces, or never will."""

    def lend(self, key: LentSegment, workers: Iterable[AgentWorker] = ()) -> None:
        """Workers are about to get it. Without any: we hold it ourselves, until `end`."""
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

    def export(
        self, segment: wire.SegmentRef, link: Uplink | HostLink
    ) -> tuple[wire.SegmentRef | None, tuple[int, Spans] | None]:
        """Make a worker's payload reachable at the other end: as it is, or in pieces, which are not copied before.

        Raises: MeshError.
        """
        if link.shares_memory:
            return segment, None
        return None, link.send_bulk(self._map(segment))

    def _map(self, segment: wire.SegmentRef) -> Sequence[Buffer]:
        """Hold a payload ourselves, until the last view of it has died."""
        key = (segment.pid, segment.segment)
        self.lend(key)
        return [buffer.data for buffer in map_segment(segment, lambda _: self.sent.append(key))]

    def settle(self) -> None:
        """Once per turn of the agent's loop: let go of what has been sent. Views may die on any thread."""
        while self.sent:
            self.end(self.sent.popleft())

    def take_back(self, worker: AgentWorker, key: LentSegment) -> None:
        """A worker has let go of it."""
        if key in worker.segments:
            worker.segments.discard(key)
            self.end(key)

    def take_back_all(self, worker: AgentWorker) -> None:
        """Take back all that a worker held, since it has ended."""
        for key in tuple(worker.segments):
            self.take_back(worker, key)
