"""The calls that the recovery of a mesh watches, and its polls of the ranks. Pure.

The first failure of a call waits for more like it (`FailingCall`), so that one error tells of them all. Eight ranks
share the cores of a machine: they fail one after the other though they failed together. So the agents are asked which
ranks run, and for how long they have. A rank that runs and has not answered may be about to fail as well, until it has
had the time for that; when all others sleep, wait in collectives or compute something, nobody will.

    failure ──> which ranks run? ──some may fail──> `LOOK_S`, ask again
                      └──none──> the error: earlier messages came before the answer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from meshbook.calls.call import OpenCall
from meshbook.calls.table import FAILURE_GRACE_S
from meshbook.errors.advice import advice
from meshbook.formatting import group_ranks, name_ranks
from meshbook.groups.deadlock import Stuck, find_deadlocked, place_of, where_stuck
from meshbook.groups.progress import Collectives
from meshbook.lifecycle import WatchPhase
from meshbook.shape.members import Members
from meshbook.wire import messages as wire


class WatchedCall(msgspec.Struct, eq=False):
    """A call that was sent, or queues, and has not completed. Its phases are `meshbook.lifecycle.WatchPhase`."""

    call: OpenCall
    ask_at: float  # the ranks are asked about it then, since it takes long
    pause_s: float  # before that
    phase: WatchPhase = WatchPhase.OPEN
    deadline: float = math.inf  # of one that has ended: it completes then, whatever the state of the groups
    stuck: frozenset[int] = frozenset()  # the ranks of an actor's call that were stuck when they were asked last


class Unsent(NamedTuple):
    """A call, or a message without an answer, that waits to be sent. mailbox: 0 for main threads."""

    mailbox: int
    members: Members
    transmit: Callable[[], object]
    call: OpenCall | None
    since: float  # the time when it was queued

    @property
    def ranks(self) -> Collection[int]:
        """Return the ranks that have not answered it."""
        return self.call.waiting if self.call is not None else frozenset(self.members.ranks())


LONGEST_GRACE_S = 0.5  # the most that an error waits, on a machine on which ranks that run get no processor
# processor time in which a rank fails as the others did: with a long traceback, of which nothing is in memory yet
FAILS_WITHIN_S = 0.02
LOOK_S = 0.001  # the pause between questions


class FailingCall:
    """A call that has failed on some ranks, and completes when no more failures can be expected."""

    def __init__(self, call: OpenCall, now: float) -> None:
        self.call = call
        # ranks that die together leave no sign of that, so nobody is asked then
        self._tell_at = now + (FAILURE_GRACE_S if call.lost else LONGEST_GRACE_S)
        self._look_at = math.inf if call.lost else now  # infinity while agents are being asked, too
        self._ran_s: dict[int, float] = {}  # how long each rank had run at the first answer about it

    @property
    def due(self) -> float:
        """Return when `is_ripe` or `must_ask` is due."""
        return 0.0 if self.call.hurried else min(self._look_at, self._tell_at)

    def is_ripe(self, now: float) -> bool:
        """Return whether to tell of the failures now."""
        return self._tell_at <= now or self.call.hurried

    def must_ask(self, now: float) -> bool:
        """Return whether to ask the agents now for the states of the ranks that have not answered, for `on_states`."""
        is_due = self._look_at <= now
        self._look_at = math.inf if is_due else self._look_at
        return is_due

    def on_states(self, states: Mapping[int, wire.ProcessState], now: float) -> None:
        """Take in the states that are known."""
        self._look_at = now + LOOK_S
        if not any(self._may_fail(rank, states.get(rank)) for rank in self.call.waiting):
            self._tell_at = min(self._tell_at, now)

    def _may_fail(self, rank: int, told: wire.ProcessState | None) -> bool:
        if told is None:
            return True  # its agent has no time to tell: others will not have either
        began_s = self._ran_s.setdefault(rank, told.ran_s)
        return told.state in ("R", "D") and told.ran_s - began_s < FAILS_WITHIN_S


class Poll(NamedTuple):
    """A question to ranks how far their groups are, with the calls and idle ranks as it is sent, and the answers."""

    id: int
    answer_s: float  # the time that ranks have to answer
    recent: int  # the number of operations of each group that is asked for
    asked: frozenset[int]
    idle: frozenset[int]  # ranks whose main threads run nothing
    ended: Mapping[int, frozenset[int]]  # by call that is open, or waits for groups, the ranks that have ended it
    about: Sequence[OpenCall]  # the calls that take long, for which it is sent
    answers: dict[int, Collectives]

    def missing(self, dead: Collection[int]) -> set[int]:
        """Return the living ranks that have not answered."""
        return {*self.asked} - self.answers.keys() - set(dead)

    def is_certain(self, dead: Collection[int]) -> bool:
        """Whether all living ranks have answered, and their groups were not aborted."""
        return not self.missing(dead) and not any(told.aborted for told in self.answers.values())

    def places(self) -> dict[int, str]:
        """Return the place in which each rank waits, as in ``all_reduce (cell 7, line 5)``."""
        return {rank: place_of(told.waiting[0]) for rank, told in self.answers.items() if told.waiting}


def describe_uneven(call: OpenCall, poll: Poll, dead: Collection[int], axes: Mapping[str, int]) -> str:
    """Return a message about a call that takes long though nothing failed; empty where no rank waits in vain.

    ``ranks 1-3 wait in barrier (cell 7, line 3), which rank 0 never entered: it has ended the cell``: it is left to the
    person. axes: those of the whole mesh.
    """
    ended = poll.ended.get(call.id)
    if ended is None:
        return ""
    stuck = find_deadlocked(poll.answers, ended, dead) or find_deadlocked(poll.answers, ended | poll.idle, dead)
    stuck = {rank: each for rank, each in stuck.items() if rank in call.waiting}
    if not stuck:
        return ""
    lines, group = [], []
    for (place, absent), ranks in _by_place(stuck):
        one = len(absent) == 1
        why = ""
        if all(rank in ended for rank in absent):
            why = f": {'it has' if one else 'they have'} ended {call.what}"
        elif not any(call.members.has(rank) for rank in absent):
            why = f": {'it does' if one else 'they do'} not run {call.what}"
            group = [f"  a collective of these ranks alone: {_name_group(call.members, axes)}"]
        lines.append(_who_waits(ranks, place, absent) + why)
    return "\n".join([*lines, *group, f"  look: {advice().stacks}    stop: interrupt"])


def _name_group(members: Members, axes: Mapping[str, int]) -> str:
    """Return the argument for a collective of the members alone: the group of an axis, or one that is to be made."""
    sizes = members.sizes
    if len(sizes) == 1 and sizes.items() <= axes.items():
        return f'group=mesh["{next(iter(sizes))}"].get_group()'
    return f"group=g, once a cell of all ranks has run g = dist.new_group({list(members.ranks())})"


def describe_stuck(stuck: Mapping[int, Stuck]) -> list[str]:
    """Return ``ranks 1-3 wait in barrier (learner.py:7), which rank 0 never entered``, a line for each place."""
    return [_who_waits(ranks, place, absent) for (place, absent), ranks in _by_place(stuck)]


def _who_waits(ranks: Collection[int], place: str, absent: Collection[int]) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{name_ranks(ranks)} {verb} in {place}, which {name_ranks(absent)} never entered"


def _by_place(stuck: Mapping[int, Stuck]) -> list[tuple[tuple[str, tuple[int, ...]], list[int]]]:
    places = where_stuck(stuck.items()).items()
    by_place = group_ranks((rank, (place, stuck[rank].absent)) for rank, place in places)
    return sorted(by_place.items(), key=lambda item: item[1])
