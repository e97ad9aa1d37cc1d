"""Ranks that end again and again are not started for ever.

A module of its own because it is pure: whoever asks brings the time, and the rule is tested without a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from meshbook.errors import CrashLoopError, WorkerLost

MAX_DEATHS = 3
WINDOW_S = 60.0


class CrashLoops:
    """When each rank of a mesh ended by itself, lately."""

    def __init__(self) -> None:
        self._deaths: dict[int, deque[float]] = {}

    def record(self, rank: int, now: float) -> None:
        """The rank has ended, and nobody had asked for it."""
        self._deaths.setdefault(rank, deque(maxlen=MAX_DEATHS + 1)).append(now)

    def check(self, lost: Mapping[int, WorkerLost], now: float) -> None:
        """Raises: CrashLoopError if one of ``lost`` ended more than `MAX_DEATHS` times within `WINDOW_S`."""
        for rank, error in sorted(lost.items()):
            recent = [at for at in self._deaths.get(rank, ()) if now - at < WINDOW_S]
            if len(recent) > MAX_DEATHS:
                raise CrashLoopError(rank, error.host, error.cause, error.log_tail, len(recent), WINDOW_S)

    def forget(self, ranks: Iterable[int]) -> None:
        """Start counting anew for ``ranks``."""
        for rank in ranks:
            self._deaths.pop(rank, None)

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Ranks have other numbers now: ``moved`` maps the old ones of those that are left."""
        self._deaths = {moved[rank]: deaths for rank, deaths in self._deaths.items() if rank in moved}
