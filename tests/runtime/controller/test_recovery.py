"""The recovery of a mesh, replayed from lists of events: no rank, no host, no clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshbook.calls.call import OpenCall
from meshbook.concurrency.future import Future
from meshbook.controller.recovery import (
    BACK_S,
    DEADLINE_S,
    SETTLE_S,
    Complete,
    Instruction,
    OwnCall,
    Recovery,
    ShowNotice,
    TellFailure,
    forming_call,
)
from meshbook.controller.watched_calls import FailingCall, Poll, Unsent
from meshbook.errors import Failure, FailureKind, WorkerLost
from meshbook.formatting import name_ranks
from meshbook.groups.agreements import Told
from meshbook.groups.progress import CellCounts, Collectives, Entered, GroupProgress, Waiting
from meshbook.lifecycle import CallEvent, GroupPhase
from meshbook.shape.members import Extent, Region
from meshbook.wire import messages as wire
from meshbook.wire.replies import encode_failure

RANKS = 4
ACTOR = 7
"""The mailbox of an actor."""


class Facts:
    """The facts about the mesh that is replayed."""

    def __init__(self) -> None:
        self.id = 1
        self.extent = Extent.of({"gpus": RANKS})
        self.axes = {"gpus": RANKS}
        self.lost: dict[int, WorkerLost] = {}


class Rank(NamedTuple):
    """The answer of a rank about its only group."""

    issued: int
    at: str = ""
    """The call that its main thread runs."""
    waits_in: str = ""
    """The operation in which it waits, which is the last that it has issued."""
    thread: int = 0
    """The thread that waits; others than the main one are those of the actor."""
    aborted: str = ""
    failed: str = ""
    """The cell that has failed there, before the last operation."""
    entered: str = ""
    """The last operation as its members must agree on it."""
    mailboxes: tuple[int, ...] = ()


class Replay:
    """A machine, fed with events by `play`. Its instructions become lines of text, and are carried out if that makes
    events: calls complete, and the attempt to form groups gets an outcome."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.next_id = itertools.count(100).__next__
        self.machine = Recovery(self.facts, self.next_id)
        self.now = 0.0
        self.lines: list[str] = []
        self.calls: dict[str, OpenCall] = {}
        self.futures: dict[str, Future[Any]] = {}
        self.epoch = -1
        self._poll: Poll | None = None
        self._first: Mapping[int, Rank] = {}
        self._poll_until = math.inf
        self._failing: FailingCall | None = None

    def play(self, *events: tuple[Any, ...]) -> list[str]:
        """Feed the machine with events, each a time, a method of ours and its arguments; returns what follows."""
        self.lines.clear()
        for at, name, *args in events:
            self.wait_until(at)
            self.now = at
            getattr(self, name)(*args)
            self._carry_out()
        return list(self.lines)

    def wait_until(self, at: float) -> None:
        """Let the time pass: what is due is done, and questions end unanswered."""
        for _ in range(10_000):
            due = max(self.now, min(self.machine.plan(), self._poll_until))
            if due > at or due == math.inf:
                return
            self.now = due
            if self._poll is not None and (self._poll_until <= due or self.machine.is_late(due)):
                self.looked({})
            self.machine.on_time(due)
            self._carry_out()
        raise AssertionError("it does not come to rest")

    # ---- events -----------------------------------------------------------------------------------------------------

    def forms(self) -> None:
        """Somebody has the groups formed."""
        future: Future[Any] = Future()
        self.machine.form(forming_call(self.next_id(), self.facts, future), self.now)

    def calls_ranks(self, name: str, *ranks: int, mailbox: int = 0, fail_fast: bool = False) -> None:
        """A call is made, of all ranks if none are given."""
        members = Region.of(self.facts.extent).select(list(ranks or range(RANKS)))
        future = self.futures[name] = Future[Any]()
        call = self.calls[name] = OpenCall(
            self.next_id(), 1, name, members, future, fail_fast=fail_fast, mailbox=mailbox
        )
        if self.machine.on_call(mailbox, members, self._sending(name), call, self.now):
            self._sending(name)()

    def calls_actor(self, name: str, *ranks: int) -> None:
        self.calls_ranks(name, *ranks, mailbox=ACTOR)

    def executes(self, name: str, *ranks: int) -> None:
        self.calls_ranks(name, *ranks, fail_fast=True)

    def returns(self, name: str, *ranks: int, told: Told | None = None) -> None:
        self._answer(name, ranks, told, lambda rank: (wire.RankReply(rank, wire.OK, 0, 0.0, None, inline=b""), []))

    def raises(self, name: str, *ranks: int, kind: FailureKind = FailureKind.RAISED) -> None:
        ename = {FailureKind.FREED: "GroupAborted", FailureKind.INTERRUPTED: "KeyboardInterrupt"}.get(
            kind, "ValueError"
        )

        def reply(rank: int) -> tuple[wire.RankReply, list[bytes]]:
            failure = Failure(rank, "a", ename, "no", (), "cell 7, line 2", kind)
            return wire.RankReply(rank, wire.RAISED, 1, 0.0, None), [encode_failure(failure)]

        self._answer(name, ranks, None, reply)

    def freed(self, name: str, *ranks: int) -> None:
        self.raises(name, *ranks, kind=FailureKind.FREED)

    def told(self, name: str, rank: int, told: Told) -> None:
        self.returns(name, rank, told=told)

    def dies(self, rank: int) -> None:
        error = self.facts.lost[rank] = WorkerLost(rank, "a", "exit code 7")
        self.machine.on_lost(self.now)
        self._carry_out()
        for call in list(self.calls.values()):
            if rank in call.waiting:
                call.lose(error)
                self._answered(call)

    def cancels(self, name: str) -> None:
        call = self.calls[name]
        if self.machine.on_cancel(call, self.now):
            call.drop()
            self._answered(call)

    def aborts(self, reason: str) -> None:
        self.machine.abort(reason, None, self.now)

    def looked(self, ranks: Mapping[int, Rank]) -> None:
        """The open question is answered, or its time is over."""
        poll, self._poll, self._poll_until = self._poll, None, math.inf
        assert poll is not None, "nothing was asked"
        answers = {rank: self._progress(told) for rank, told in {**self._first, **ranks}.items()}
        self._first = {}
        self.machine.on_poll(poll, answers, self.now)
        self._carry_out()

    def looked_first(self, ranks: Mapping[int, Rank]) -> None:
        """Some ranks have answered the open question; the others have time left."""
        self._first = ranks

    def states(self, **states: tuple[str, float]) -> None:
        """Agents tell the states of processes: ``r1=("R", 0.5)``."""
        assert self._failing is not None
        told = {int(rank[1:]): wire.ProcessState(*state) for rank, state in states.items()}
        self._failing.on_states(told, self.now)

    def passes(self) -> None:
        """Nothing happens but that time passes."""

    def _progress(self, told: Rank) -> Collectives:
        at = self.calls[told.at].id if told.at in self.calls else 0
        entered = (Entered(told.issued, hash(told.entered), told.entered, ("",), "cell 7, line 2"),)
        group = GroupProgress(
            "0", tuple(range(RANKS)), told.issued, {}, {}, self.epoch, aborted=told.aborted, mailboxes=told.mailboxes,
            by_cells=CellCounts(0 if told.mailboxes else told.issued), recent=entered if told.entered else (),
        )  # fmt: skip
        waiting = Waiting("0", told.waits_in, told.issued, None, "cell 7, line 2", 0.1, told.thread)
        failed = self.calls[told.failed].id if told.failed else 0
        return Collectives(
            self.epoch, at, (group,), (waiting,) if told.waits_in else (), told.aborted,
            handling={told.thread: ACTOR} if told.thread else {},
            failed_call=failed, failed_at={"0": told.issued - 1} if failed else {},
        )  # fmt: skip

    def _answer(
        self, name: str, ranks: tuple[int, ...], told: Told | None, reply: Callable[[int], tuple[Any, list[bytes]]]
    ) -> None:
        call = self.calls[name]
        for rank in ranks or sorted(call.waiting):
            call.answer(*reply(rank), ())
            if told is not None:
                self.machine.on_told(call, rank, told, self.now)
        self._answered(call)

    def _answered(self, call: OpenCall) -> None:
        if not self.machine.on_answered(call, self.now):
            self._carry_out()
        elif not call.waiting:
            self._do(Complete(call))

    # ---- instructions -----------------------------------------------------------------------------------------------

    def _sending(self, name: str) -> Callable[[], None]:
        return lambda: self.lines.append(f"send {name}")

    def _carry_out(self) -> None:
        while self.machine.todo:
            self._do(self.machine.todo.popleft())

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case wire.AbortGroups(target=target, reason=reason, groups=groups):
                ranks = name_ranks(rank for part in target for rank in part.ranks())
                only = f" in {', '.join(groups)}" if groups else ""
                self.lines.append(f"abort {ranks}{only}: {reason.splitlines()[0]}")
            case wire.Cancel():
                self.lines.append("give up forming")
            case wire.DropKeys():
                self.lines.append("drop keys")
            case Poll():
                self.lines.append("ask")
                self._poll, self._poll_until = instruction, self.now + instruction.answer_s
            case FailingCall():
                self.lines.append(f"ask for states of {name_ranks(instruction.call.waiting)}")
                self._failing = instruction
            case OwnCall(call, endpoint, args):
                self.lines.append("form" + (f" {args[1]}" if args[1] else "") if endpoint == "form_group" else endpoint)
                if endpoint == "form_group":
                    self.calls["forming"], self.epoch = call, args[0]
                    call.when_settled(lambda error: self.machine.on_formed(call, error, self.now))
            case Unsent(transmit=transmit):
                transmit()
            case ShowNotice(call, text):
                self.lines.append(f"notice of {call.what}: {text.splitlines()[0]}")
            case TellFailure(call):
                self._settle(call, "")
            case Complete(call, groups):
                self._settle(call, groups)
                call.close(CallEvent.SETTLED)

    def _settle(self, call: OpenCall, groups: str) -> None:
        future = self.futures.get(call.what)
        was_done = future is not None and future.done()
        call.settle(groups)
        if future is not None and not was_done:
            error = future.exception(0)
            self.lines.append(f"{call.what} fails: {str(error).splitlines()[0]}" if error else f"{call.what} is done")
            self.lines.extend([f"  {groups}"] if groups else [])


@pytest.fixture
def replay() -> Replay:
    """A replay with groups that were formed."""
    replay = Replay()
    assert replay.play((0.0, "forms"), (0.1, "returns", "forming")) == ["form"]
    assert replay.machine.phase is GroupPhase.FORMED and replay.machine.plan() == math.inf
    return replay


def all_at(**told: Any) -> dict[int, Rank]:
    return {rank: Rank(**told) for rank in range(RANKS)}


STUCK = {rank: Rank(5, "cell 7", "all_reduce") for rank in (0, 2, 3)} | {1: Rank(4)}
"""Ranks 0, 2 and 3 wait for rank 1, which has ended the cell."""

FREED = (
    (1.0, "calls_ranks", "cell 7"),
    (2.0, "raises", "cell 7", 1),
    (2.03, "looked", STUCK),
    (2.04, "freed", "cell 7", 0, 2, 3),
    (2.05, "returns", "forming"),
)
"""One rank raises in a collective of all: the recording of a whole recovery."""


def test_a_call_that_goes_well_leaves_nothing_to_do(replay: Replay) -> None:
    lines = replay.play((1.0, "calls_ranks", "cell 7"), (1.1, "returns", "cell 7", 2), (1.2, "returns", "cell 7"))
    assert lines == ["send cell 7", "cell 7 is done"]
    assert replay.play((60.0, "passes")) == []


def test_one_rank_raises_and_those_that_wait_for_it_are_freed(replay: Replay) -> None:
    assert replay.play(*FREED) == [
        "send cell 7",
        "ask",
        "abort ranks 0-3: rank 1 raised ValueError",
        "drop keys",
        "form",
        "cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)",
    ]
    assert replay.machine.phase is GroupPhase.FORMED
    error: Any = replay.futures["cell 7"].exception(0)
    assert error.freed == dict.fromkeys((0, 2, 3), "all_reduce (cell 7, line 2)") and not error.groups


def test_all_raise_and_equal_groups_stay(replay: Replay) -> None:
    lines = replay.play(
        (1.0, "calls_ranks", "cell 7"), (2.0, "raises", "cell 7"), (2.01, "looked", all_at(issued=4)), (60.0, "passes")
    )
    assert lines == ["send cell 7", "ask", "cell 7 fails: ranks 0-3 raised ValueError: no (cell 7, line 2)"]


def test_groups_that_are_not_equally_far_are_formed_again(replay: Replay) -> None:
    uneven = {**all_at(issued=5), 1: Rank(4)}
    lines = replay.play(
        (1.0, "calls_ranks", "cell 7"),
        (2.0, "raises", "cell 7", 1),
        (2.01, "returns", "cell 7"),
        (2.02, "looked", uneven),
        (2.1, "returns", "forming"),
    )
    assert lines[1:3] == ["ask", "abort ranks 0-3: the members of group 0 are not equally far"]
    assert lines[-1] == "cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)"


def test_who_does_not_answer_proves_nothing_and_is_named_at_the_deadline(replay: Replay) -> None:
    silent = {rank: told for rank, told in all_at(issued=4).items() if rank != 3}
    replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "raises", "cell 7"))
    replay.play((2.2, "looked", silent), (2.7, "looked", silent), (3.9, "looked_first", silent))
    lines = replay.play((2.0 + DEADLINE_S + 0.01, "passes"))
    assert [line for line in lines if line != "ask"] == [
        "cell 7 fails: ranks 0-3 raised ValueError: no (cell 7, line 2)",
        "  the process groups could not be compared: rank 3 does not answer",
    ]
    replay.play((4.3, "looked", all_at(issued=4)))
    assert replay.play((60.0, "passes")) == []  # it is known now


def test_a_straggler_holds_the_failed_cell_up_until_it_has_ended(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "raises", "cell 7", 1))
    lines = replay.play((2.03, "looked", {**STUCK, 2: Rank(4, "cell 7")}), (2.04, "freed", "cell 7", 0, 3))
    assert lines[:2] == ["ask", "abort ranks 0-3: rank 1 raised ValueError"]  # what rank 2 does helps nobody
    lines = replay.play((30.0, "freed", "cell 7", 2))
    assert lines[-1] == "form" and set(lines[:-1]) == {"ask"}
    lines = replay.play((30.01, "returns", "forming"))
    assert lines == ["cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)"]


def test_a_job_of_other_ranks_keeps_its_groups_and_is_waited_for(replay: Replay) -> None:
    seen = {0: Rank(5, "cell 7", "all_reduce"), 1: Rank(4), 2: Rank(4, "job"), 3: Rank(4, "job")}
    replay.play((1.0, "calls_ranks", "cell 7", 0, 1), (1.0, "calls_ranks", "job", 2, 3))
    lines = replay.play(
        (2.0, "raises", "cell 7", 1), (2.03, "looked", seen), (2.04, "freed", "cell 7", 0), (4.1, "passes")
    )
    assert "abort ranks 0,1: rank 1 raised ValueError" in lines and "form" not in lines
    assert lines[lines.index("cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)") + 1] == (
        "  the process groups are not back yet: they are formed again when ranks 2,3 have ended job"
    )
    assert replay.play((9.0, "returns", "job"))[-2:] == ["job is done", "form"]


def test_those_who_wait_for_somebody_that_was_spared_for_others_are_freed_too(replay: Replay) -> None:
    seen = {0: Rank(5, "cell 7", "all_reduce"), 1: Rank(4), 2: Rank(4, "job"), 3: Rank(4, "job")}
    replay.play((1.0, "calls_ranks", "cell 7", 0, 1), (1.0, "calls_ranks", "job", 2, 3))
    replay.play((2.0, "raises", "cell 7", 1), (2.03, "looked", seen), (2.04, "freed", "cell 7", 0), (2.1, "passes"))
    gone = dict.fromkeys((0, 1), Rank(4, aborted="rank 1 raised ValueError"))
    lines = replay.play((2.15, "looked", {**gone, 2: Rank(5, "job", "barrier"), 3: Rank(5, "job", "barrier")}))
    assert lines[-2:] == ["abort ranks 0-3: rank 1 raised ValueError", "drop keys"]


def test_a_dead_rank_frees_all_and_nothing_is_formed_before_a_repair(replay: Replay) -> None:
    lines = replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "dies", 1), (2.1, "freed", "cell 7"), (60.0, "passes"))
    assert lines[1:3] == ["abort ranks 0,2,3: rank 1 ended", "drop keys"] and "form" not in lines
    assert "cell 7 fails: rank 1 on a ended: exit code 7" in lines
    error: Any = replay.futures["cell 7"].exception(0)
    assert sorted(error.freed) == [0, 2, 3]
    assert replay.play((61.0, "calls_ranks", "cell 8", 0)) == ["send cell 8"]
    replay.facts.lost.clear()  # it was started again
    assert replay.play((62.0, "returns", "cell 8"), (62.0, "forms"))[-1] == "form"
    assert replay.play((62.1, "returns", "forming")) == ["drop keys"]
    assert replay.machine.phase is GroupPhase.FORMED


def test_ranks_at_a_call_without_the_dead_one_are_spared(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7", 0, 1), (1.0, "calls_ranks", "job", 2, 3))
    assert replay.play((2.0, "dies", 1))[0] == "abort rank 0: rank 1 ended"


# ---- while groups are formed -----------------------------------------------------------------------------------------

FORMING = (*FREED[:3], (2.04, "freed", "cell 7", 0, 2, 3))


def test_an_abort_while_groups_are_formed_has_them_formed_once_more(replay: Replay) -> None:
    replay.play(*FORMING)
    lines = replay.play((2.05, "aborts", "asked for"), (2.06, "freed", "forming"), (2.2, "returns", "forming"))
    assert lines[:2] == ["abort ranks 0-3: asked for", "drop keys"]
    assert [line for line in lines if line != "ask"][2:] == [
        "form", "cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)"
    ]  # fmt: skip


def test_a_rank_that_cannot_form_them_frees_the_others(replay: Replay) -> None:
    replay.play(*FORMING)
    lines = replay.play((2.05, "raises", "forming", 2))
    assert lines == ["abort ranks 0-3: rank 2 raised ValueError", "drop keys"]
    lines = [line for line in replay.play((2.06, "freed", "forming")) if line != "ask"]
    assert lines[0].startswith("cell 7 fails") and replay.machine.phase is GroupPhase.ABORTED
    assert lines[1].startswith("  the process groups are not back yet: forming them again failed: rank 1 raised")


def test_a_loss_while_groups_are_formed_completes_the_cell_without_them(replay: Replay) -> None:
    replay.play(*FORMING)
    lines = replay.play((2.05, "dies", 3), (2.06, "freed", "forming"), (60.0, "passes"))
    assert lines[:3] == [
        "cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)", "abort ranks 0-2: rank 3 ended", "drop keys"
    ]  # fmt: skip
    assert "form" not in lines and replay.machine.phase is GroupPhase.ABORTED


def test_a_rank_that_does_not_come_holds_the_cell_up_for_two_seconds_and_the_groups_for_ten(replay: Replay) -> None:
    replay.play(*FORMING, (2.1, "returns", "forming", 0, 1, 3))
    lines = replay.play((4.1, "passes"))
    assert lines[-2:] == [
        "cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)",
        "  the process groups are not back yet: rank 2 did not come within 2 s",
    ]
    assert replay.play((30.0, "passes")).count("give up forming") == 1
    replay.play(
        (
            31.0,
            "raises",
            "forming",
            2,
        )
    )
    assert replay.machine.phase is GroupPhase.ABORTED
    replay.play((31.0, "calls_ranks", "cell 8"), (31.1, "returns", "cell 8"))
    assert replay.play((31.2, "returns", "forming"))[-1] == "drop keys"  # the end of the next cell has tried again


def test_an_interrupt_ends_forming_that_takes_long(replay: Replay) -> None:
    replay.play(*FORMING, (2.1, "calls_ranks", "cell 8"))
    assert replay.play((3.0, "cancels", "cell 8")) == []  # it is only just under way
    assert "give up forming" in replay.play((4.5, "cancels", "cell 8"))


def test_a_cell_that_ends_while_groups_are_formed_is_compared_in_the_new_ones(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7", 0, 1), (2.0, "forms"), (2.1, "raises", "cell 7"))
    assert replay.play((2.2, "returns", "forming")) == ["drop keys", "ask"]
    assert replay.play((2.3, "looked", all_at(issued=0))) == [
        "cell 7 fails: ranks 0,1 raised ValueError: no (cell 7, line 2)"
    ]


# ---- calls that queue ------------------------------------------------------------------------------------------------


def test_a_cell_behind_a_failed_one_is_sent_when_the_groups_are_back(replay: Replay) -> None:
    replay.play(*FREED[:2])
    assert replay.play((2.0, "calls_ranks", "cell 8"), (2.0, "calls_ranks", "cell 9", 3)) == []
    assert "send cell 8" not in replay.play(*FREED[2:3])
    lines = replay.play(*FREED[3:])
    assert [line for line in lines if line.startswith("send")] == ["send cell 8", "send cell 9"]
    assert replay.play((3.0, "returns", "cell 8"), (3.0, "returns", "cell 9"))[-1] == "cell 9 is done"


def test_one_that_queues_is_dropped_by_its_interrupt(replay: Replay) -> None:
    replay.play(*FREED[:2], (2.0, "calls_ranks", "cell 8"))
    replay.play((2.01, "cancels", "cell 8"), *FREED[2:])
    assert "KeyboardInterrupt" in str(replay.futures["cell 8"].exception(0)) or replay.futures["cell 8"].done()
    failures: Any = replay.futures["cell 8"].exception(0)
    assert {each.evalue for each in failures.failures} == {"cancelled before it started"}


def test_who_shares_ranks_and_mailbox_with_one_that_queues_queues_behind_it(replay: Replay) -> None:
    replay.play((1.0, "calls_actor", "step", 0, 1), (2.0, "raises", "step", 0))
    assert replay.play((2.01, "calls_actor", "behind", 1, 2), (2.01, "calls_actor", "behind that", 2)) == []
    assert replay.play((2.02, "calls_actor", "elsewhere", 3)) == []  # it might meet the failed one
    lines = replay.play((2.1, "returns", "step", 1), (2.0 + SETTLE_S + BACK_S, "passes"))
    assert [line for line in lines if line.startswith("send")] == ["send behind", "send behind that", "send elsewhere"]


def test_others_wait_half_a_second_at_most_after_an_actor_has_failed(replay: Replay) -> None:
    replay.play((1.0, "calls_actor", "step", 0, 1), (2.0, "raises", "step", 0), (2.0, "calls_ranks", "cell 7", 1, 2))
    assert "send cell 7" not in replay.play((2.0 + SETTLE_S - 0.01, "passes"))
    assert "send cell 7" in replay.play((2.0 + SETTLE_S + 0.01, "passes"))


def test_a_call_that_was_given_up_is_forgotten(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "raises", "cell 7", 1), (2.0, "calls_ranks", "cell 8"))
    for name in ("cell 7", "cell 8"):
        replay.machine.forget(replay.calls[name])
    replay.play((2.1, "looked", all_at(issued=4)))
    assert replay.play((600.0, "passes")) == []


# ---- actors ----------------------------------------------------------------------------------------------------------

ACTORS_STUCK = {rank: Rank(5, waits_in="all_reduce", thread=9, mailboxes=(ACTOR,)) for rank in (0, 2, 3)} | {
    1: Rank(4, mailboxes=(ACTOR,))
}


def test_actors_are_freed_at_the_second_proof_and_groups_formed_when_they_are_idle(replay: Replay) -> None:
    replay.play((1.0, "calls_actor", "step"), (2.0, "raises", "step", 1))
    assert replay.play((2.03, "looked", ACTORS_STUCK)) == ["ask"]
    lines = replay.play((2.06, "looked", ACTORS_STUCK))
    assert lines[0] == "ask" and lines[1].startswith("notice of step: step: rank 1 raised ValueError; ranks 0,2,3 wait")
    assert lines[2:] == ["abort ranks 0-3: rank 1 raised ValueError", "drop keys"]
    assert replay.machine.phase is GroupPhase.DRAINING
    at_work = {rank: Rank(5, thread=9, aborted="rank 1 raised ValueError", mailboxes=(ACTOR,)) for rank in range(4)}
    assert replay.play((2.08, "looked", at_work)) == ["ask"]
    idle = all_at(issued=5, aborted="rank 1 raised ValueError", mailboxes=(ACTOR,))
    lines = replay.play((2.09, "freed", "step"), (2.10, "looked", idle), (2.2, "returns", "forming"))
    assert "step fails: rank 1 raised ValueError: no (cell 7, line 2)" in lines and "form" in lines
    assert replay.machine.phase is GroupPhase.FORMED


def test_draining_lasts_a_second_at_most(replay: Replay) -> None:
    replay.play((1.0, "calls_actor", "step"), (2.0, "raises", "step", 1))
    replay.play((2.03, "looked", ACTORS_STUCK), (2.06, "looked", ACTORS_STUCK))
    assert "form" in replay.play((5.0, "passes"))  # and as long as it takes to see who does not answer


# ---- nobody failed ---------------------------------------------------------------------------------------------------


def test_a_call_that_takes_long_is_explained_once(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "returns", "cell 7", 1), (3.0, "passes"))
    lines = replay.play((3.01, "looked", STUCK))
    assert lines == ["notice of cell 7: ranks 0,2,3 wait in all_reduce (cell 7, line 2), which rank 1 never entered: "
                     "it has ended cell 7"]  # fmt: skip
    assert replay.play((600.0, "passes")) == []


def test_ranks_that_disagree_are_freed_and_their_cell_fails(replay: Replay) -> None:
    apart = {
        rank: Rank(5, "cell 7", "all_reduce", entered=f"{'broadcast' if rank else 'all_reduce'}") for rank in range(4)
    }
    replay.play((1.0, "calls_ranks", "cell 7"), (3.0, "passes"))
    lines = replay.play((3.01, "looked", apart))
    assert lines[0].startswith("notice of cell 7: ranks 0 and 1-3 disagree in operation 5")
    assert lines[1].startswith("abort ranks 0-3: ranks 0 and 1-3 disagree")
    lines = replay.play((3.1, "freed", "cell 7"), (3.2, "returns", "forming"))
    assert any(line.startswith("cell 7 fails: ranks 0 and 1-3 disagree") for line in lines)


def test_a_rank_that_tells_of_broken_groups_has_them_compared(replay: Replay) -> None:
    replay.play((1.0, "calls_ranks", "cell 7"))
    lines = replay.play((1.1, "told", "cell 7", 2, Told(replay.epoch, (), broken=True)), (1.2, "returns", "cell 7"))
    assert lines == ["ask"]
    assert replay.play((1.3, "looked", all_at(issued=4))) == ["cell 7 is done"]


def test_the_first_failure_of_an_execute_is_told_when_nobody_else_can_fail(replay: Replay) -> None:
    lines = replay.play((1.0, "executes", "work"), (2.0, "raises", "work", 1), (2.001, "passes"))
    assert lines == ["send work", "ask for states of ranks 0,2,3"]
    lines = replay.play(
        (
            2.002,
            "states",
        ),
        (2.004, "passes"),
    )
    assert lines == ["ask for states of ranks 0,2,3"]  # their host did not answer
    asleep = {f"r{rank}": ("S", 1.0) for rank in range(RANKS)}
    replay.machine._telling[replay.calls["work"].id].on_states(
        {int(rank[1:]): wire.ProcessState(*state) for rank, state in asleep.items()}, 2.004
    )
    assert replay.play((2.005, "passes")) == ["work fails: rank 1 raised ValueError: no (cell 7, line 2)"]
    assert replay.calls["work"].waiting == {0, 2, 3}


def test_a_mesh_without_groups_has_none_after_a_failure() -> None:
    replay = Replay()
    replay.play((1.0, "calls_ranks", "cell 7"), (2.0, "raises", "cell 7"))
    nothing = {rank: Rank(0) for rank in range(RANKS)}
    assert replay.play((2.1, "looked", nothing))[-1].startswith("cell 7 fails")


def test_it_stops_at_once_and_what_waits_completes(replay: Replay) -> None:
    replay.play(*FORMING, (2.1, "calls_ranks", "cell 8"))
    replay.machine.stop(2.2)
    assert replay.play((60.0, "passes")) == ["cell 7 fails: rank 1 raised ValueError: no (cell 7, line 2)"]


# ---- whatever happens ------------------------------------------------------------------------------------------------

NAMES = [f"cell {number}" for number in range(4)] + [f"step {number}" for number in range(4)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens_calls_complete_and_nothing_waits_for_ever(data: st.DataObject) -> None:
    """All ranks end all calls at last: then each call completes, and nothing queues."""
    replay = Replay()
    replay.play((0.0, "forms"), (0.1, "returns", "forming"))
    ranks = st.sets(st.integers(0, RANKS - 1), min_size=1).map(sorted)
    for _ in range(data.draw(st.integers(0, 30), "events")):
        at = replay.now + data.draw(st.sampled_from([0.0, 0.01, 0.05, 0.3, 2.5]), "pause")
        replay.wait_until(at)
        replay.now = at
        sent = [name for name in replay.calls if replay.calls[name].waiting and f"send {name}" in replay.lines]
        new = [name for name in NAMES if name not in replay.calls]
        kind = data.draw(st.sampled_from(["call", "returns", "raises", "look", "abort", "dies", "cancels"]), "kind")
        if kind == "call" and new:
            name = data.draw(st.sampled_from(new))
            mailbox = ACTOR + data.draw(st.integers(0, 1)) if name.startswith("step") else 0
            alive = [rank for rank in data.draw(ranks) if rank not in replay.facts.lost]
            if alive:
                replay.calls_ranks(name, *alive, mailbox=mailbox, fail_fast=data.draw(st.booleans()))
        elif kind in ("returns", "raises") and (sent or replay.calls["forming"].waiting):
            name = data.draw(st.sampled_from([*sent, *(["forming"] if replay.calls["forming"].waiting else [])]))
            getattr(replay, kind)(name, data.draw(st.sampled_from(sorted(replay.calls[name].waiting))))
        elif kind == "look" and replay._poll is not None:
            busy = {rank: name for name in sent if name.startswith("cell") for rank in replay.calls[name].waiting}
            answers = {}
            for rank in data.draw(ranks):
                waits = data.draw(st.sampled_from(["", "all_reduce"])) if rank in busy else ""
                answers[rank] = Rank(data.draw(st.integers(4, 5)), busy.get(rank, ""), waits)
            replay.looked(answers)
        elif kind == "abort":
            replay.aborts("asked for")
        elif kind == "dies" and len(replay.facts.lost) < 2:
            rank = data.draw(st.integers(0, RANKS - 1))
            if rank not in replay.facts.lost:
                replay.dies(rank)
        elif kind == "cancels" and (waiting := [name for name in replay.futures if replay.calls[name].waiting]):
            replay.cancels(data.draw(st.sampled_from(waiting)))
        replay._carry_out()
    for _ in range(40):
        replay.wait_until(replay.now + 1.0)
        replay.now += 1.0
        if replay._poll is not None:
            cells = [name for name in replay.futures if name.startswith("cell")]
            busy = {rank: name for name in cells for rank in replay.calls[name].waiting}
            alive = [rank for rank in range(RANKS) if rank not in replay.facts.lost]
            replay.looked({rank: Rank(5, busy.get(rank, "")) for rank in alive})
        for name, call in list(replay.calls.items()):
            if call.waiting and (name == "forming" or f"send {name}" in replay.lines):
                replay.returns(name)
        replay._carry_out()
    assert not any(call.waiting for call in replay.calls.values()), "some were never sent"
    assert all(future.done() for future in replay.futures.values())
    replay.lines.clear()
    replay.wait_until(replay.now + 20.0)
    assert not replay.machine._troubled and not replay.machine._queue
