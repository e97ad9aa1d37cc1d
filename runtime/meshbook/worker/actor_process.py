"""What actors need of the process in which they live: that of a rank, or the one that drives meshes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from meshbook.calls.answer import Outcome
from meshbook.errors import Failure
from meshbook.values.pickling import Pickled, dumps
from meshbook.wire import messages as wire
from meshbook.worker.actor_inbox import Inbox
from meshbook.worker.mail_turn import IdleSelector

if TYPE_CHECKING:
    from meshbook.worker.worker import Worker


class ActorProcess(Protocol):
    """Used by the threads of actors, and by whoever hands out their mail."""

    @property
    def identity(self) -> wire.Identity:
        """Who the process is now; another object when it has become another rank."""

    def describe(self, error: BaseException) -> Failure:
        """A failure of what user code has raised. Not called on two threads at once, unless one takes too long."""

    def dumps(self, value: object, *, what: str) -> Pickled:
        """Pickle an answer, on the thread of its actor. Raises: SerializationError."""

    def output_beside(self, output: int) -> AbstractContextManager[object]:
        """Inside the block what the thread, or task, prints belongs to the output of this id."""

    def end_child(self, failure: Failure | None) -> None:
        """At the end of a call: end the process if user code has forked it in that call."""

    def give_up(self, is_meant: Callable[[wire.Call], bool], answer: Outcome) -> None:
        """Answer the open calls that nobody else will answer any more."""

    def new_inbox(self) -> Inbox:
        """The messages of one actor."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Make an event loop on the thread of its actor."""


class RankProcess:
    """That of a rank."""

    def __init__(self, worker: Worker) -> None:
        self._worker, shell, self._turn = worker, worker.shell, worker.mail.turn
        self.describe, self.output_beside = shell.describe, shell.output_beside
        self.end_child, self.give_up = worker.end_child, worker.mail.give_up
        self.dumps = dumps

    @property
    def identity(self) -> wire.Identity:
        return self._worker.identity

    def new_inbox(self) -> Inbox:
        return Inbox(self._turn.lead, self._turn.wake)

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        if type(loop) is not asyncio.SelectorEventLoop:  # of a policy that user code has set
            return loop
        loop.close()
        return asyncio.SelectorEventLoop(IdleSelector(self._turn))
