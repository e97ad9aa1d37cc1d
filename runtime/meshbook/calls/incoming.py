"""A call between its arrival at a mailbox and its reply, in a worker or in the controller's process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from meshbook.calls.answer import Outcome
from meshbook.calls.mailboxes import CallArguments, Mailboxes
from meshbook.errors import Failure, MeshError
from meshbook.wire import messages as wire


class IncomingCall:
    """What a handler gets of a call; each part is used once, on any thread."""

    __slots__ = ("_came_at", "_discard", "_left", "call", "on_cancel")

    def __init__(
        self,
        call: wire.Call,
        load: Callable[[], CallArguments],
        discard: Callable[[], object],
        send: Callable[[Outcome, float], object],
    ) -> None:
        """load: builds the arguments. discard: lets go of them. send: takes the answer and the time since we began."""
        self.call = call
        self.on_cancel: Callable[[wire.Call, bool], None] | None = None
        """That of its mailbox, which may have closed since."""
        self._left: dict[str, Callable[..., Any]] = {"load": load, "send": send}
        """What was not used yet: the interpreter never splits a `dict.pop`, so each goes to one thread."""
        self._discard = discard
        self._came_at = time.monotonic()

    def load(self) -> CallArguments:
        """Build the arguments, as `meshbook.calls.mailboxes.LoadArgs` says."""
        load = self._left.pop("load", None)
        assert load is not None, "arguments are loaded once"
        args: CallArguments = load()
        return args

    def reply(self, answer: Outcome) -> None:
        """Answer, as `meshbook.calls.mailboxes.ReplyTo` says."""
        if (send := self._left.pop("send", None)) is None:
            return
        if self._left.pop("load", None) is not None:
            self._discard()
        if self.call.reply:
            send(answer, time.monotonic() - self._came_at)


class IncomingCalls:
    """The calls that have come to the mailboxes of this process. ``boxes`` and `give_up` are for any thread."""

    def __init__(self) -> None:
        self.boxes = Mailboxes()
        self.open: dict[tuple[wire.Origin | None, int], IncomingCall] = {}
        """Those that wait for their reply; whoever sends one takes its call out."""

    def deliver(self, incoming: IncomingCall, rank: int, host: str) -> Exception | None:
        """Hand a call to its mailbox; what that raises is the answer, and returned. rank, host: ours."""
        call = incoming.call
        if call.reply:
            self.open[call.origin, call.id] = incoming
        try:
            mailbox = self.boxes.find(call.mailbox, rank)
            incoming.on_cancel = mailbox.on_cancel
            mailbox.handler(call, incoming.load, incoming.reply)
        except Exception as error:
            incoming.reply(refusal(error, rank, host))
            return error
        return None

    def cancel(self, cancel: wire.Cancel) -> None:
        """Tell the mailbox of a call that has no answer yet."""
        incoming = self.open.get((cancel.origin, cancel.call))
        if incoming is not None and incoming.on_cancel is not None:
            incoming.on_cancel(incoming.call, cancel.insist)

    def give_up(self, is_meant: Callable[[wire.Call], bool], answer: Outcome) -> None:
        """Answer the open calls that nobody else will answer any more. From any thread."""
        for incoming in list(self.open.values()):
            if is_meant(incoming.call):
                incoming.reply(answer)


def refusal(error: Exception, rank: int, host: str) -> Outcome:
    """The answer when a mailbox could not take a call."""
    return Outcome(wire.RAISED, failure=describe(error, rank, host))


def describe(error: BaseException, rank: int, host: str) -> Failure:
    """Make a failure of what our own code has raised; our own errors have no traceback that tells a person anything."""
    text, name = str(error), type(error).__name__
    lines = (f"{name}: {text}",) if isinstance(error, MeshError) else tuple(traceback.format_exception(error))
    return Failure(rank, host, name, text, lines, "", error if isinstance(error, Exception) else None)
