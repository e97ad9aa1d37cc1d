"""Calls and messages of one mesh that may not be sent yet. Under the turn.

A rank that has failed a call would begin the next at once, and its collectives would meet those that others still wait
in. So what is sent meanwhile queues here, not on the ranks. Whoever shares ranks with a call that queues, and goes to
the same mailbox, queues behind it: each rank gets what it is sent in the order of sending.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from meshbook.calls.call import OpenCall
from meshbook.concurrency.own_faults import attempt
from meshbook.shape.members import Members


class Unsent(NamedTuple):
    """A call, or a message without an answer, that is to be sent. mailbox: 0 for main threads."""

    mailbox: int
    members: Members
    transmit: Callable[[], object]
    call: OpenCall | None
    since: float
    """When it came here."""

    @property
    def ranks(self) -> Collection[int]:
        """Who has not answered it."""
        return self.call.waiting if self.call is not None else frozenset(self.members.ranks())

    def goes_after(self, other: Unsent) -> bool:
        """Whether ranks of it would get ``other`` first."""
        return self.mailbox == other.mailbox and not set(self.ranks).isdisjoint(other.ranks)


class CallQueue:
    """must_wait: whether one may not be sent yet; asked again at each `release`, and ``patience_s`` after it came."""

    def __init__(self, must_wait: Callable[[Unsent], bool], patience_s: tuple[float, ...]) -> None:
        self._must_wait, self._patience_s = must_wait, patience_s
        self.queued: list[Unsent] = []
        self._wake_at = math.inf

    def send(
        self, mailbox: int, members: Members, transmit: Callable[[], object], call: OpenCall | None = None
    ) -> None:
        """Have ``transmit`` send it, now or when it may be."""
        new = Unsent(mailbox, members, transmit, call, time.monotonic())
        if self._is_blocked(new, self.queued):
            self.queued.append(new)
            self.wake(new.since + self._patience_s[0])
        else:
            transmit()

    def holds(self, call: OpenCall) -> bool:
        """Return whether the call queues here."""
        return bool(self.queued) and any(queued.call is call for queued in self.queued)

    def drop(self, call: OpenCall) -> bool:
        """Its end was asked for; whether it queued here, and has now been dropped on all of its ranks."""
        left = [queued for queued in self.queued if queued.call is not call]
        if len(left) == len(self.queued):
            return False
        self.queued = left
        call.drop()
        return True

    def wake(self, at: float) -> None:
        """Look again at ``at``, if anything queues then."""
        self._wake_at = min(self._wake_at, at)

    @property
    def due(self) -> float:
        """When `release` wants to be called, though nothing has happened."""
        return self._wake_at if self.queued else math.inf

    def release(self) -> None:
        """Send what need not queue any more, in the order in which it came."""
        if not self.queued:
            return
        queued, self.queued = self.queued, []
        for each in queued:
            if self._is_blocked(each, self.queued):
                self.queued.append(each)
            elif each.ranks:
                attempt(each.transmit, "what had queued")  # others queue behind it
        now = time.monotonic()
        times = [each.since + patience_s for each in self.queued for patience_s in self._patience_s]
        self._wake_at = min((at for at in (*times, self._wake_at) if at > now), default=math.inf)

    def clear(self) -> None:
        """The mesh ends."""
        self.queued.clear()

    def _is_blocked(self, new: Unsent, before: list[Unsent]) -> bool:
        return any(new.goes_after(other) for other in before) or self._must_wait(new)
