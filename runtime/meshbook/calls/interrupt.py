"""An interrupt as the controller carries it out: in stages, each of which gives the prompt back within a second.

    1  KeyboardInterrupt in the calls, where they run; calls that wait behind others are dropped where they wait
    2  a second interrupt insists: process groups are aborted, stopped processes continued, and KeyboardInterrupt
       is raised again and again (`meshbook.worker.interrupt_gate`)
    3  ranks that still do not stop are named, with the reason and the ways out

A press while a stage waits begins the next one at once. A rank that obeys later is usable again from then on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from meshbook.calls.rank_state import Reaction, Reactions, place_of
from meshbook.concurrency.future import Future
from meshbook.concurrency.interrupts import SigintScope
from meshbook.errors import CallInterrupted
from meshbook.formatting import group_ranks, name_ranks
from meshbook.lifecycle import CallPhase

if TYPE_CHECKING:
    from meshbook.calls.call import OpenCall

GRACE_S = 0.55
"""The time that a stage gives ranks to obey before it looks where the others are."""
INSIST_GRACE_S = 0.65
"""The same for a second interrupt."""
LOOK_S = 0.25
"""The time of that look; together they stay below a second."""

UNANSWERED = "it was told to stop and has not ended the call yet"
"""The place of a stuck call to a mailbox, of which no more is known."""


class CallControl(Protocol):
    """The part of a controller that the future of its call, and an interrupt, need."""

    def cancel(self, id: int, *, insist: bool = False, ranks: Collection[int] | None = None) -> None:
        """Interrupt a call where it runs, drop it where it waits; on all of its members, or on ``ranks`` of them."""

    def reactions(self, mesh_id: int, ranks: Iterable[int], timeout_s: float) -> Reactions:
        """Return for every rank its place and how it takes an interrupt."""

    def free_groups(self, mesh_id: int, ranks: Iterable[int]) -> None:
        """Abort the process groups that ``ranks`` wait in."""

    def open_calls(self, mesh_id: int) -> list[OpenCall]:
        """The calls that some rank has not answered, oldest first."""

    def drive(self, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Serve the sockets until ``done()`` or the timeout, if that is for this thread to do."""

    def wants_person(self, call: OpenCall) -> bool:
        """Whether a rank of the call is stopped at a prompt that this thread could open."""

    def attend(self, call: OpenCall) -> None:
        """Open that prompt. Raises: KeyboardInterrupt, LeftStopped."""


def interrupt(control: CallControl, calls: Sequence[OpenCall], ranks: Collection[int] | None = None) -> CallInterrupted:
    """Interrupt ``calls``; returns who obeyed within the grace time, and where the others are and why.

    A call that waits behind one that was interrupted before and is still stuck takes that along: the person insists.
    ranks: only these. Raises: nothing, further presses of interrupt included.
    """
    if not calls:
        return CallInterrupted((), {})
    with noticed() as interrupt_counter:
        every = _with_stuck_ahead(control, calls)
        before = {call.id: _waiting(call, ranks) for call in every}
        stage = 1 + max(call.interrupts for call in every)
        while True:
            pressed = _one_stage(control, every, ranks, stage, interrupt_counter)
            left = any(_waiting(call, ranks) for call in every)
            if not left or not pressed or stage >= 3:
                return _report(control, calls, every, ranks, before, stage)
            stage += 1


def _one_stage(
    control: CallControl,
    calls: Sequence[OpenCall],
    ranks: Collection[int] | None,
    stage: int,
    interrupt_counter: InterruptCounter,
) -> bool:
    """Send the messages of the stage, and wait. Returns: whether another press cut it short."""
    insist = stage >= 2
    for call in calls:
        call.interrupt(stage)
        call.when_ended(interrupt_counter.wake)
        control.cancel(call.id, insist=insist, ranks=ranks)
    if insist:
        control.free_groups(calls[0].mesh, set().union(*(_waiting(call, ranks) for call in calls)))
    until = time.monotonic() + (INSIST_GRACE_S if insist else GRACE_S)
    while any(_is_open(call, ranks) for call in calls) and time.monotonic() < until:
        interrupt_counter.wait(until)
        if interrupt_counter.take():
            return True
    return False


def _report(
    control: CallControl,
    calls: Sequence[OpenCall],
    every: Sequence[OpenCall],
    ranks: Collection[int] | None,
    before: Mapping[int, set[int]],
    stage: int,
) -> CallInterrupted:
    mesh = calls[0].mesh
    obeyed: set[int] = set()
    stuck: set[int] = set()
    skipping: set[int] = set()
    for call in every:
        left = _waiting(call, ranks)
        dropped = before[call.id] & call.dropped
        obeyed |= before[call.id] - left - dropped - {lost.rank for lost in call.lost}
        running = left - _ahead_of(control, [call], left).keys()
        stuck |= running
        skipping |= dropped | (left - running)
    busy = _ahead_of(control, calls, skipping) if skipping else {}
    if all(call.mailbox for call in every):  # what main threads do says nothing of it
        places, stopped = dict.fromkeys(stuck | busy.keys(), UNANSWERED), set()
    else:
        reactions = control.reactions(mesh, stuck | busy.keys(), LOOK_S) if stuck or busy else {}
        places = {rank: place_of(answer) for rank, answer in reactions.items()}
        stopped = {rank for rank in stuck if isinstance(it := reactions[rank], Reaction) and it.has_stopped}
    stuck -= stopped
    obeyed = (obeyed | stopped) - stuck
    skipping -= obeyed
    names = _ahead_of(control, calls, stuck)
    return CallInterrupted(
        obeyed,
        {rank: _in_call(names.get(rank), places[rank]) for rank in stuck},
        stage=stage,
        skipping={rank: _in_call(busy.get(rank), places.get(rank, "")) for rank in skipping},
        partial=calls[0].results if len(calls) == 1 else None,
    )


def _in_call(call: OpenCall | None, place: str) -> str:
    return f"{call.what}: {place}" if call is not None else place


def _waiting(call: OpenCall, ranks: Collection[int] | None) -> set[int]:
    waiting = set(call.waiting)
    return waiting if ranks is None else waiting.intersection(ranks)


def _is_open(call: OpenCall, ranks: Collection[int] | None) -> bool:
    """Whether ranks are to obey, or have obeyed and the outcome is kept for the next request."""
    return bool(_waiting(call, ranks)) or (not call.waiting and call.phase is not CallPhase.CLOSED)


def _queue(control: CallControl, calls: Sequence[OpenCall]) -> list[OpenCall]:
    """The open calls that wait for each other with ``calls``, oldest first: each mailbox has a queue of its own."""
    mailboxes = {call.mailbox for call in calls}
    return [other for other in control.open_calls(calls[0].mesh) if other.mailbox in mailboxes]


def _with_stuck_ahead(control: CallControl, calls: Sequence[OpenCall]) -> list[OpenCall]:
    """The calls, and those ahead of them that were interrupted before."""
    waiting = set().union(*(call.waiting for call in calls))
    last = max(call.id for call in calls)
    queue = [other for other in _queue(control, calls) if other not in calls and other.id < last]
    return [*(other for other in queue if other.interrupts and waiting & other.waiting), *calls]


def _ahead_of(control: CallControl, calls: Sequence[OpenCall], ranks: Iterable[int]) -> dict[int, OpenCall]:
    """Return the call that runs on each rank, where that is none of ``calls``: the oldest that it has not answered."""
    queue = _queue(control, calls)
    running = {rank: next((other for other in queue if rank in other.waiting), None) for rank in ranks}
    return {rank: call for rank, call in running.items() if call is not None and call not in calls}


def describe_wait(control: CallControl, call: OpenCall, *, only_stuck: bool = False) -> str:
    """Return the calls that a call waits behind, a line per place; empty when it runs everywhere.

    only_stuck: report calls that were interrupted and did not stop, not slow ones.
    """
    found = _ahead_of(control, [call], set(call.waiting)).items()
    ahead = {rank: other for rank, other in found if other.id < call.id and (other.interrupts or not only_stuck)}
    if not ahead:
        return ""
    places = control.reactions(call.mesh, ahead, LOOK_S)
    texts = group_ranks((rank, _in_call(other, place_of(places[rank]))) for rank, other in ahead.items())
    return "\n".join(
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} still in {text}" for text, ranks in texts.items()
    )


class InterruptCounter:
    """A counter of interrupts since the last look."""

    def __init__(self) -> None:
        self._count = 0
        self._wake: Future[None] = Future()

    def press(self, signum: int, frame: FrameType | None) -> None:
        """The handler. A future may be completed in the midst of anything."""
        self._count += 1
        self._wake.set_result(None)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        self._wake.set_result(None)

    def take(self) -> bool:
        """Return whether interrupt was pressed since the last look, and forget it."""
        count, self._count = self._count, 0
        return count > 0

    def wait(self, until: float) -> None:
        """Wait for `wake`, a press, or the moment ``until`` on the monotonic clock."""
        with contextlib.suppress(TimeoutError):
            self._wake.get(max(0.0, until - time.monotonic()))
        self._wake = Future()
        if self._count:
            self._wake.set_result(None)


@contextlib.contextmanager
def noticed() -> Iterator[InterruptCounter]:
    """Inside of the block presses are counted rather than raised."""
    interrupt_counter = InterruptCounter()
    scope = SigintScope(interrupt_counter.press)
    opened = scope.open()
    try:
        yield interrupt_counter
    finally:
        if opened:
            scope.close()
