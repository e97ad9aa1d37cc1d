"""The question to all ranks of a mesh how far their process groups are, and the calls that are asked about for long.

One question is open at a time, under the turn. A call can wait for ranks that never come though nothing failed: some of
its ranks ended it long before the others, or it was never sent to all ranks of the mesh. That is said once, and left to
the person. Ranks that disagree about operations are freed (`meshbook.groups.agreements`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from meshbook.calls.call import OpenCall
from meshbook.calls.table import CallTable, OpenQuestion
from meshbook.controller.mesh_state import MeshState
from meshbook.controller.queries import ask_rank, put
from meshbook.errors.advice import advice
from meshbook.formatting import group_ranks, name_ranks
from meshbook.groups.deadlock import Odd, Stuck, find_deadlocked, where_stuck
from meshbook.groups.progress import Collectives
from meshbook.shape.members import Members

FIRST_LOOK_S = 0.025  # the ranks are asked so long after one failed; most failures have ended everywhere by then
SELDOM_LOOK_S = 0.25  # they are asked again less and less often, in the end once in so many seconds
ANSWER_S = 0.25  # time for ranks to answer; native code may hold the GIL
# operations of each group that ranks tell of; all that they remember, where they are known to disagree
RECENT, ALL = 16, 1024
PATIENCE_S = 2.0  # the same on a machine that is slow to answer: the time doubles while answers are missing


class ProgressSnapshot(NamedTuple):
    """The calls and the idle ranks when a question was sent, and the answers since."""

    id: int
    until: float
    ended: dict[int, frozenset[int]]  # by call that was open then, the ranks that had ended it
    idle: frozenset[int]  # ranks whose main threads ran nothing then
    asked: frozenset[int]
    answers: dict[int, Collectives]
    recent: int = RECENT  # how many operations of each group were asked for

    def missing(self, dead: Collection[int]) -> set[int]:
        """Return the living ranks that have not answered."""
        return {*self.asked} - self.answers.keys() - set(dead)


class ProgressPoll:
    """The question that is under way, and the time of the next. on_complete: takes the answers, or those in time."""

    def __init__(
        self,
        mesh: MeshState,
        calls: CallTable,
        next_id: Callable[[], int],
        on_complete: Callable[[ProgressSnapshot], None],
    ) -> None:
        self._mesh, self._calls, self._next_id, self._on_complete = mesh, calls, next_id, on_complete
        self.look: ProgressSnapshot | None = None  # the snapshot of the question that is open
        self._question: OpenQuestion[Collectives] | None = None
        self._answer_s = ANSWER_S
        self.look_at = math.inf  # when to ask the next question
        self._pause_s = FIRST_LOOK_S
        self.odd: list[Odd] = []  # groups that were odd when the ranks were asked last, which may have been chance

    # ---- when -----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether answers are awaited."""
        return self.look is not None

    def is_due(self, now: float) -> bool:
        """Whether it is time to `ask`."""
        return self.look is None and self.look_at <= now

    def look_in(self, pause_s: float) -> None:
        """Have the ranks asked after ``pause_s`` at the latest."""
        self.look_at = min(self.look_at, time.monotonic() + pause_s)

    def look_soon(self, pause_s: float = FIRST_LOOK_S) -> None:
        """Have the ranks asked after ``pause_s``, since something has failed, then less and less often."""
        self._pause_s = FIRST_LOOK_S
        self.look_in(pause_s)

    def look_again(self, longest_s: float = SELDOM_LOOK_S) -> None:
        """Have them asked after a pause twice as long as the one before."""
        self.look_in(self._pause_s)
        self._pause_s = min(2 * self._pause_s, longest_s)

    def rest(self) -> None:
        """Have the ranks asked no more, until `look_in`."""
        self.look_at = math.inf

    # ---- the question -----------------------------------------------------------------------------------------------

    def ask(self, calls: list[OpenCall], recent: int = RECENT) -> None:
        """Ask all living ranks. calls: those that are open, or have just ended. recent: operations of each group."""
        self.rest()
        mesh = self._mesh
        alive = frozenset(range(mesh.extent.nelements)) - mesh.lost.keys()
        ended = {call.id: frozenset(call.members.ranks()) - call.waiting for call in calls}
        idle = alive.difference(*(call.waiting for call in calls if not call.mailbox))
        look = self.look = ProgressSnapshot(
            self._next_id(), time.monotonic() + self._answer_s, ended, idle, alive, {}, recent
        )
        question = OpenQuestion(look.id, mesh.id, Collectives, self._answer_s, partial(self._on_answers, look))
        put(self._calls, question, mesh, mesh.by_host(range(mesh.extent.nelements)), ask_rank("collectives", recent))
        self._question = question

    def expire(self, now: float) -> None:
        """Go on with the answers that have come when the time is over; ``now`` may be infinity."""
        if self._question is not None and self._question.until <= now:
            self._calls.end(self._question)

    def give_up(self) -> None:
        """Forget the question, since the mesh ends."""
        self.rest()
        if self._question is not None:
            self._calls.forget(self._question)
            self.look = self._question = None

    def _on_answers(self, look: ProgressSnapshot, question: OpenQuestion[Collectives]) -> None:
        if look is not self.look:
            return  # asked again meanwhile
        self.look = self._question = None
        look.answers.update(question.told)
        self._answer_s = min(2 * self._answer_s, PATIENCE_S) if look.missing(self._mesh.lost) else ANSWER_S
        self._on_complete(look)

    # ---- groups that seem odd --------------------------------------------------------------------------------------

    def confirm(self, found: list[Odd]) -> list[Odd]:
        """Return the groups that are odd for certain, or were so, equally far, when the ranks were asked before."""
        confirmed = [each for each in found if each.is_certain or each in self.odd]
        self.odd = [] if confirmed else found
        return confirmed


TELL_S = 2.0  # a call may take so long before the ranks are asked
SELDOM_S = 30.0  # they are asked again less and less often, in the end once in so many seconds


class LongCalls:
    """The open calls of one mesh, with when to ask their ranks: less and less often."""

    def __init__(self) -> None:
        # by id, with the time of the next question, and the pause before it
        self.calls: dict[int, tuple[OpenCall, float, float]] = {}
        self.due = math.inf  # when the ranks should be asked; may be too early, see `is_due`

    def suspect(self, call: OpenCall) -> None:
        """Note that ranks of the call may wait in vain from now on; a call that is known changes nothing."""
        if call.id not in self.calls:
            now = time.monotonic()
            self.calls[call.id] = (call, now + TELL_S, TELL_S)
            self.due = min(self.due, now + TELL_S)

    def silence(self, call: OpenCall) -> None:
        """Ask no more about a call, since its message was shown."""
        self.calls[call.id] = (call, math.inf, math.inf)

    def postpone(self, now: float) -> list[OpenCall]:
        """Return the calls for which the ranks are asked now, and plan the next question after a longer pause."""
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


def describe_uneven(call: OpenCall, look: ProgressSnapshot, dead: Collection[int], axes: Mapping[str, int]) -> str:
    """Return a message about a call that takes long; empty where no rank waits in vain. ``ranks 1-3 wait in barrier
    (cell 7, line 3), which rank 0 never entered: it has ended the cell``. axes: those of the whole mesh."""
    ended = look.ended.get(call.id)
    if ended is None:
        return ""
    stuck = find_deadlocked(look.answers, ended, dead) or find_deadlocked(look.answers, ended | look.idle, dead)
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


def place_and_absent(stuck: Mapping[int, Stuck]) -> list[str]:
    """Return ``ranks 1-3 wait in barrier (learner.py:7), which rank 0 never entered``, a line for each place."""
    return [_who_waits(ranks, place, absent) for (place, absent), ranks in _by_place(stuck)]


def _who_waits(ranks: Collection[int], place: str, absent: Collection[int]) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{name_ranks(ranks)} {verb} in {place}, which {name_ranks(absent)} never entered"


def _by_place(stuck: Mapping[int, Stuck]) -> list[tuple[tuple[str, tuple[int, ...]], list[int]]]:
    places = where_stuck(stuck.items()).items()
    by_place = group_ranks((rank, (place, stuck[rank].absent)) for rank, place in places)
    return sorted(by_place.items(), key=lambda item: item[1])
