"""Meshes that stop by themselves: idle for too long, or older than they may become; a note warns before.

A mesh is idle while no call to it runs and no actor of its ranks has anything to do. Work of its ranks in threads that
cells have left behind does not count.
"""

from __future__ import annotations

import time

import msgspec

from meshbook.concurrency.background import run_in_background
from meshbook.errors import MeshError
from meshbook.formatting import format_duration
from meshbook.mesh import states
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook_extension.output.labels import WARN, show_message
from meshbook_extension.output.publisher import CellSink, Publisher, Scheduled

WARN_S = 300.0
"""The time before the end at which the note comes, or a tenth of the limit if that is less."""

LOOK_S = 30.0
"""The most time between two looks; a twentieth of the limit where that is less."""


class Limit(msgspec.Struct, frozen=True):
    """The time limits of a mesh."""

    idle_s: float = 0.0
    """The time that it may be idle; 0: for ever."""
    total_s: float = 0.0
    """The age that it may reach; 0: any age."""
    began: float = 0.0
    """The time of its spawn, in seconds since the epoch: the next kernel goes on counting."""


class TimeLimit(Scheduled):
    """The watch over one mesh, on the publisher's thread; another thread stops the mesh."""

    def __init__(self, procs: ProcMesh, limit: Limit, sink: CellSink) -> None:
        """sink: the output for notes, that of the running cell."""
        self.procs, self.limit = procs.base(), limit
        self._sink = sink
        self._used_at = time.monotonic()
        self._warned = False
        self.is_over = False
        """Whether another limit has taken its place."""

    def pump(self, now: float) -> float | None:
        """Look at the mesh; returns when to look again, None once it has ended."""
        if not self.procs.alive or self.is_over:
            return None
        left_s, why = self._left(now)
        warn_s = min(WARN_S, (self.limit.idle_s if why == "idle" else self.limit.total_s) / 10)
        if left_s <= 0:
            self._tell(f"stops now: {self._reason(why)}")
            run_in_background(self._stop)
            return None
        if left_s > warn_s:
            self._warned = False
        elif not self._warned:
            keep = "; any cell for it keeps it" if why == "idle" else ""
            self._tell(f"stops in {format_duration(left_s)}: {self._reason(why)}{keep}")
            self._warned = True
        shortest = min(filter(None, (self.limit.idle_s, self.limit.total_s)))
        return now + min(LOOK_S, shortest / 20, left_s if left_s <= warn_s else left_s - warn_s)

    def fail(self, error: Exception) -> None:
        """Warn that the mesh is not watched any more, and so would run on for ever."""
        self._tell(f"is not watched any more, so it does not stop by itself: {error}")

    def _left(self, now: float) -> tuple[float, str]:
        """Return the seconds left, and the limit (idle or old) that they are of."""
        self._used_at = max(self._used_at, states.called_at(self.procs))
        age_left = self.limit.began + self.limit.total_s - time.time() if self.limit.total_s else float("inf")
        idle_left = self._used_at + self.limit.idle_s - now if self.limit.idle_s else float("inf")
        if idle_left <= 0 and any(actor.doing for actor in self.procs.base().actors()):
            self._used_at, idle_left = now, self.limit.idle_s
        return (idle_left, "idle") if idle_left < age_left else (age_left, "old")

    def _reason(self, why: str) -> str:
        if why == "idle":
            return f"idle for {format_duration(self.limit.idle_s)} (--idle-stop)"
        return f"{format_duration(self.limit.total_s)} are over (--max-hours)"

    def _tell(self, text: str) -> None:
        show_message(self._sink, WARN, f'mesh "{self.procs.name}" {text}')

    def _stop(self) -> None:
        try:
            self.procs.stop()
        except (MeshError, TimeoutError) as error:
            self._tell(f"did not stop: {error}")


class TimeLimits:
    """The time limits of a notebook's meshes, by their ids."""

    def __init__(self) -> None:
        self._limits: dict[int, TimeLimit] = {}

    def add(self, procs: ProcMesh, limit: Limit, sink: CellSink, publisher: Publisher) -> None:
        """Watch a mesh with a limit, in place of the limit that it had."""
        if (before := self._limits.pop(procs.id, None)) is not None:
            before.is_over = True
        if limit.idle_s or limit.total_s:
            self._limits[procs.id] = TimeLimit(procs, limit, sink)
            publisher.schedule(self._limits[procs.id], time.monotonic())

    def of(self, procs: ProcMesh) -> Limit:
        """Return the limit of a mesh; without one, that of no limits."""
        known = self._limits.get(procs.id)
        return Limit() if known is None else known.limit

    def go_on(self, earlier: TimeLimits, publisher: Publisher) -> None:
        """Watch the meshes of an earlier session, whose publisher has stopped."""
        self._limits = earlier._limits
        for limit in self._limits.values():
            publisher.schedule(limit, time.monotonic())
