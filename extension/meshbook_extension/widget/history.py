"""What the charts of the widget show: memory, throughput, GPU use over the last ticks, all ranks together. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from meshbook.mesh.proc_mesh import RankStatus
    from meshbook_extension.widget.snapshot import Snapshot

POINTS = 120
"""Ticks that the charts show."""

LEAST_S = 0.4
"""Two readings that are closer tell no rate."""

Spread: TypeAlias = tuple[int, int, int]
"""The least, the median and the largest of the ranks."""


class History:
    """The last `POINTS` ticks. A chart whose values nobody has stays empty."""

    def __init__(self) -> None:
        names = ("memory_mb", "moved_kb_s", "gpu_percent")
        self._charts: dict[str, deque[Spread]] = {name: deque(maxlen=POINTS) for name in names}

    def add(self, snapshot: Snapshot) -> None:
        """Add one tick."""
        columns = {
            "memory_mb": [mb for mb in snapshot.memory_mb if mb],
            "moved_kb_s": snapshot.moved_kb_s,
            "gpu_percent": [percent for percent in snapshot.gpu_percent if percent >= 0],
        }
        for name, values in columns.items():
            if values:
                self._charts[name].append((min(values), median_low(values), max(values)))

    def live(self) -> dict[str, list[Spread]]:
        """Return the points that travel to the browser."""
        return {name: list(points) for name, points in self._charts.items()}


class Throughput:
    """What each rank moves per second, from counters that only grow."""

    def __init__(self) -> None:
        self._counted: Mapping[int, tuple[int, int]] = {}
        self._at = float("-inf")
        self._rates: dict[int, int] = {}

    def rates(self, statuses: Sequence[RankStatus], at_s: float) -> list[int]:
        """Bytes per second since the last reading, for each rank; 0 at first, and for a rank that was started since.

        at_s: monotonic.
        """
        counted = {one.rank: (one.pid, one.moved_bytes) for one in statuses}
        passed = at_s - self._at
        if passed >= LEAST_S:
            self._rates = {
                rank: round((moved - before[1]) / passed)
                for rank, (pid, moved) in counted.items()
                if (before := self._counted.get(rank)) is not None and before[0] == pid and moved >= before[1]
            }
            self._counted, self._at = counted, at_s
        return [self._rates.get(one.rank, 0) for one in statuses]
