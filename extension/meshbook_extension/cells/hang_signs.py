"""When a running cell should say who holds it up: decided from looks at its ranks, some seconds apart. Pure.

    held      ranks have waited for `HELD_S` without a break for one that does not come; or all wait for each other
    slow      ranks spend most of their time waiting, and one hardly any: it has more to do, or does it slower
    alone     most have ended long ago, the rest runs on

Cells whose ranks keep pace give no sign, however long they run. Each sign is given once, and few in all.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import NamedTuple

from meshbook.groups.stragglers import RankProgress, find_stragglers
from meshbook.stacks.mesh_stacks import RankTold

HELD_S = 5.0
CIRCLE_S = 2.0
"""The same where ranks wait for each other, which no patience helps."""
ALONE_S, ALONE_TIMES = 8.0, 3
"""The others have ended so long ago, and in less than a third of the time."""
WINDOW_S = 6.0
"""Shares of waiting are taken over so long, at least."""
WINDOW_STEPS = 3
"""And over so many operations."""
WAITING_SHARE, WORKING_SHARE = 0.6, 0.2
MOST = 3
"""Signs that one cell gives."""

HELD, SLOW, ALONE = "held", "slow", "alone"


class Sign(NamedTuple):
    """Something that the person should know."""

    kind: str
    odd: tuple[int, ...]
    share: float = 0.0
    """For `SLOW`: how much of their time the others wait."""
    times: float = 0.0
    """For `SLOW`: how much longer the odd rank works than the others."""


class Ended(NamedTuple):
    """The ranks that have ended the cell."""

    ranks: int
    longest_s: float
    """What the slowest of them took."""
    last_at: float
    """When the last one ended, monotonic."""


class _Start(NamedTuple):
    at: float
    told: Mapping[int, RankTold]


class HangDetector:
    """The detector watches one cell."""

    def __init__(self) -> None:
        self._given: set[tuple[str, tuple[int, ...]]] = set()
        self._start: _Start | None = None
        self._resumed = float("-inf")
        """When a rank was last seen at a prompt."""

    @property
    def spent(self) -> bool:
        """Whether nothing more will come."""
        return len(self._given) >= MOST

    def given(self, sign: Sign) -> None:
        """Note that the person was told."""
        self._given.add((sign.kind, sign.odd))

    def look(
        self, now: float, told: Mapping[int, RankTold], running: Collection[int], ended: Ended | None = None
    ) -> Sign | None:
        """A sign, if there is a new one.

        now: monotonic. told: what ranks of the mesh answered. running, ended: the ranks of the cell.
        """
        if any(one.paused for one in told.values()):
            self._start, self._resumed = None, now
            return None
        if now - self._resumed < HELD_S:  # the others have waited for the person, not for a rank
            return None
        for sign in (_held(told, running), self._slow(now, told, running), _alone(now, told, running, ended)):
            if sign is not None and (sign.kind, sign.odd) not in self._given:
                return sign
        return None

    def _slow(self, now: float, told: Mapping[int, RankTold], running: Collection[int]) -> Sign | None:
        here = {rank: told[rank] for rank in running if rank in told}
        start = self._start
        if start is None or here.keys() != start.told.keys():
            self._start = _Start(now, here)
            return None
        if len(here) < 2 or now - start.at < WINDOW_S:
            return None
        self._start = _Start(now, here)
        if min(_issued(one) - _issued(start.told[rank]) for rank, one in here.items()) < WINDOW_STEPS:
            return None
        passed_s = now - start.at
        shares = {
            rank: (one.collectives.waited_s - start.told[rank].collectives.waited_s) / passed_s
            for rank, one in here.items()
        }
        odd = min(shares, key=lambda rank: shares[rank])
        others = statistics.median(share for rank, share in shares.items() if rank != odd)
        if shares[odd] > WORKING_SHARE or others < WAITING_SHARE:
            return None
        return Sign(SLOW, (odd,), min(others, 1.0), (1 - shares[odd]) / max(1 - others, 0.01))


def _issued(told: RankTold) -> int:
    return sum(
        group.issued + sum(group.sent.values()) + sum(group.received.values()) for group in told.collectives.groups
    )


def _held(told: Mapping[int, RankTold], running: Collection[int]) -> Sign | None:
    poll = {rank: RankProgress("", one.collectives) for rank, one in told.items()}
    poll.update({rank: RankProgress("", None) for rank in running if rank not in told})
    verdict = find_stragglers(poll)
    if verdict is None or not set(verdict.odd) & set(running):  # of those that never come the runtime tells
        return None
    return Sign(HELD, verdict.odd) if verdict.since_s >= (CIRCLE_S if verdict.circular else HELD_S) else None


def _alone(now: float, told: Mapping[int, RankTold], running: Collection[int], ended: Ended | None) -> Sign | None:
    if ended is None or not running or ended.ranks < len(running):
        return None
    if any(rank in told and told[rank].collectives.waiting for rank in running):
        return None  # the runtime tells of ranks that wait for others that have ended
    late = now - ended.last_at >= max(ALONE_S, ALONE_TIMES * ended.longest_s)
    return Sign(ALONE, tuple(sorted(running))) if late else None
