"""Calls that may not be sent yet: who queues behind whom, and what is sent when."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshbook.calls.call import OpenCall
from meshbook.concurrency.future import Future
from meshbook.controller.call_queue import CallQueue, Unsent
from meshbook.errors import CallFailed
from meshbook.lifecycle import CallEvent
from meshbook.shape.members import Region

WHOLE = Region.of({"gpus": 4})


class _Gate:
    """A queue whose calls wait while it is shut for their mailbox."""

    def __init__(self) -> None:
        self.shut: set[int] = set()
        self.sent: list[str] = []
        self.queue = CallQueue(self._must_wait, (60.0, 120.0))

    def _must_wait(self, new: Unsent) -> bool:
        return new.mailbox in self.shut

    def send(self, name: str, *ranks: int, mailbox: int = 0, call: OpenCall | None = None) -> None:
        self.queue.send(mailbox, WHOLE.select(list(ranks)), self._transmit(name), call)

    def _transmit(self, name: str) -> Callable[[], None]:
        return lambda: self.sent.append(name)


def test_what_need_not_wait_is_sent_at_once() -> None:
    gate = _Gate()
    gate.send("first", 0, 1)
    assert gate.sent == ["first"] and gate.queue.due == math.inf


def test_who_shares_ranks_and_mailbox_with_one_that_queues_queues_behind_it() -> None:
    gate = _Gate()
    gate.shut.add(7)
    gate.send("first", 0, 1, mailbox=7)
    gate.shut.clear()
    gate.send("behind it", 1, 2, mailbox=7)
    gate.send("other ranks", 3, mailbox=7)
    gate.send("another mailbox", 0, 1, mailbox=8)
    assert gate.sent == ["other ranks", "another mailbox"]
    assert gate.queue.due < math.inf
    gate.queue.release()
    assert gate.sent[2:] == ["first", "behind it"] and gate.queue.due == math.inf


def test_one_that_cannot_be_sent_does_not_keep_those_behind_it() -> None:
    gate = _Gate()
    gate.shut.add(0)
    gate.queue.send(0, WHOLE, lambda: 1 / 0)
    gate.send("behind it", 0)
    gate.shut.clear()
    gate.queue.release()
    assert gate.sent == ["behind it"]


def test_a_call_that_queues_is_dropped_on_all_of_its_ranks() -> None:
    gate, future = _Gate(), Future[object]()
    call = OpenCall(1, 1, "cell 3", WHOLE, future, fail_fast=False)
    gate.shut.add(0)
    gate.send("cell 3", 0, 1, 2, 3, call=call)
    assert gate.queue.holds(call) and gate.queue.drop(call) and not gate.queue.drop(call)
    call.settle()
    call.close(CallEvent.SETTLED)
    error = future.exception(0)
    assert isinstance(error, CallFailed) and error.ranks == (0, 1, 2, 3)
    assert {failure.evalue for failure in error.failures} == {"cancelled before it started"}
    gate.shut.clear()
    gate.queue.release()
    assert gate.sent == []
