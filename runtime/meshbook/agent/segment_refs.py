"""Payloads in shared memory that workers of a host look at, until the last of them has let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from meshbook.agent.worker import AgentWorker

LentSegment: TypeAlias = tuple[int, int]
"""(pid of its owner, number)."""


class SegmentRefCounts:
    """Of one host; ``on_unused(pid, segment)`` is called when nobody has a segment any more."""

    def __init__(self, on_unused: Callable[[int, int], None]) -> None:
        self._on_unused = on_unused
        self._holders: dict[LentSegment, int] = {}

    def lend(self, key: LentSegment, workers: Iterable[AgentWorker] = ()) -> None:
        """Workers are about to get it. Without any: we hold it ourselves, until `end`."""
        holders = list(workers)
        self._holders[key] = self._holders.get(key, 0) + (len(holders) or 1)
        for worker in holders:
            worker.segments.add(key)

    def end(self, key: LentSegment) -> None:
        """One holder less."""
        left = self._holders.get(key, 0) - 1
        if left > 0:
            self._holders[key] = left
        elif left == 0:
            del self._holders[key]
            self._on_unused(*key)

    def take_back(self, worker: AgentWorker, key: LentSegment) -> None:
        """A worker has let go of it."""
        if key in worker.segments:
            worker.segments.discard(key)
            self.end(key)

    def take_back_all(self, worker: AgentWorker) -> None:
        """A worker has ended."""
        for key in tuple(worker.segments):
            self.take_back(worker, key)
