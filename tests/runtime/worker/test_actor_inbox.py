"""Messages on their way to an actor."""

from __future__ import annotations

import asyncio

from meshbook.calls.mailboxes import Outcome
from meshbook.wire import messages as wire
from meshbook.worker.actor_inbox import Inbox


def _next(inbox: Inbox) -> object:
    return asyncio.run(inbox.get())


def test_a_message_that_was_taken_and_not_begun_can_still_be_dropped() -> None:
    inbox, answers = Inbox(), list[Outcome]()
    call = wire.Call(1, 1, "step", (), mailbox=7)
    inbox.put(call, lambda: ((), {}), answers.append)
    message = _next(inbox)
    assert inbox.drop(call)
    assert [answer.status for answer in answers] == [wire.DROPPED]
    assert not inbox.begin(message)  # type: ignore[arg-type]


def test_a_message_is_begun_once_and_not_dropped_afterwards() -> None:
    inbox, answers = Inbox(), list[Outcome]()
    call = wire.Call(1, 1, "step", (), mailbox=7)
    inbox.put(call, lambda: ((), {}), answers.append)
    message = _next(inbox)
    assert inbox.begin(message) and not inbox.begin(message)  # type: ignore[arg-type]
    assert not inbox.drop(call) and not answers
