"""Calls whose ranks wait for others that never come though nobody failed: said once, and left to the person. Pure.

Such a call has ranks that ended it long before the others, or was never sent to all ranks of the mesh; or all of its
ranks wait for each other in operations in which they disagree, from which they are freed
(`meshbook.groups.agreements`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from meshbook.calls.call import OpenCall
from meshbook.controller.progress_poll import ProgressSnapshot
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks
from meshbook.groups.deadlock import Stuck, find_deadlocked, where_stuck

TELL_S = 2.0
"""So long a call may take before the ranks are asked."""

SELDOM_S = 30.0
"""They are asked again less and less often, in the end once in so many seconds."""


class LongCalls:
    """The open calls of one mesh, with when to ask their ranks: less and less often."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[OpenCall, float, float]] = {}
        """By id, with the time of the next question, and the pause before it."""
        self.due = math.inf
        """When the ranks should be asked; may be too early, see `is_due`."""

    def suspect(self, call: OpenCall) -> None:
        """Ranks of the call may wait in vain from now on; again is no news."""
        if call.id not in self.calls:
            now = time.monotonic()
            self.calls[call.id] = (call, now + TELL_S, TELL_S)
            self.due = min(self.due, now + TELL_S)

    def silence(self, call: OpenCall) -> None:
        """What there is to be said of it has been said."""
        self.calls[call.id] = (call, math.inf, math.inf)

    def postpone(self, now: float) -> list[OpenCall]:
        """The calls for which the ranks are asked now, and again after a longer while."""
        found = [call for call, due, _ in self.calls.values() if due <= now]
        for call in found:
            pause_s = min(2 * self.calls[call.id][2], SELDOM_S)
            self.calls[call.id] = (call, now + pause_s, pause_s)
        self.due = min((due for _, due, _ in self.calls.values()), default=math.inf)
        return found

    def is_due(self, now: float) -> bool:
        """Whether the ranks should be asked now."""
        if self.due > now:
            return False
        self.due = min((due for _, due, _ in self.calls.values()), default=math.inf)
        return self.due <= now


def describe_uneven(call: OpenCall, look: ProgressSnapshot, dead: Collection[int]) -> str:
    """What is to be said of a call that takes long; empty where nobody waits in it in vain.

    ``ranks 1-3 wait in barrier (cell 7, line 3), which rank 0 never entered: it has ended the cell``
    """
    ended = look.ended.get(call.id)
    if ended is None:
        return ""
    stuck = find_deadlocked(look.answers, ended, dead) or find_deadlocked(look.answers, ended | look.idle, dead)
    stuck = {rank: each for rank, each in stuck.items() if rank in call.waiting}
    if not stuck:
        return ""
    lines = []
    for (place, absent), ranks in _by_place(stuck):
        one = len(absent) == 1
        why = ""
        if all(rank in ended for rank in absent):
            why = f": {'it has' if one else 'they have'} ended {call.what}"
        elif not any(call.members.has(rank) for rank in absent):
            why = f": {'it does' if one else 'they do'} not run {call.what}"
        lines.append(_who_waits(ranks, place, absent) + why)
    return "\n".join([*lines, f"  look: {advice().stacks}    stop: interrupt"])


def place_and_absent(stuck: Mapping[int, Stuck]) -> list[str]:
    """``ranks 1-3 wait in barrier (learner.py:7), which rank 0 never entered``, a line for each place."""
    return [_who_waits(ranks, place, absent) for (place, absent), ranks in _by_place(stuck)]


def _who_waits(ranks: Collection[int], place: str, absent: Collection[int]) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{name_ranks(ranks)} {verb} in {place}, which {name_ranks(absent)} never entered"


def _by_place(stuck: Mapping[int, Stuck]) -> list[tuple[tuple[str, tuple[int, ...]], list[int]]]:
    by_place: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, place in where_stuck(stuck.items()).items():
        by_place.setdefault((place, stuck[rank].absent), []).append(rank)
    return sorted(by_place.items(), key=lambda item: item[1])
