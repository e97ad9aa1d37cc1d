"""A call between its arrival at a mailbox and its reply, in a worker or in the controller's process."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from meshbook.calls.answer import Outcome
from meshbook.errors import Failure, MeshError
from meshbook.wire import messages as wire


class IncomingCall:
    """What a handler gets of a call; each part is used once, on any thread."""

    __slots__ = ("_came_at", "_discard", "_load", "_lock", "_replied", "_send", "call", "on_cancel")

    def __init__(
        self,
        call: wire.Call,
        load: Callable[[], Any],
        discard: Callable[[], object],
        send: Callable[[Outcome, float], object],
    ) -> None:
        """load: builds the arguments. discard: lets go of them. send: takes the answer and the time since we began."""
        self.call = call
        self.on_cancel: Callable[[wire.Call, bool], None] | None = None
        """That of its mailbox, which may have closed since."""
        self._load: Callable[[], Any] | None = load
        self._discard, self._send = discard, send
        self._lock = threading.Lock()
        self._replied = False
        self._came_at = time.monotonic()

    def load(self) -> Any:
        """`meshbook.calls.mailboxes.LoadArgs`."""
        load = self._take()
        assert load is not None, "arguments are loaded once"
        return load()

    def reply(self, answer: Outcome) -> None:
        """`meshbook.calls.mailboxes.ReplyTo`."""
        with self._lock:
            if self._replied:
                return
            self._replied = True
        if self._take() is not None:
            self._discard()
        if self.call.reply:
            self._send(answer, time.monotonic() - self._came_at)

    def _take(self) -> Callable[[], Any] | None:
        with self._lock:
            load, self._load = self._load, None
        return load


def refusal(error: Exception, rank: int, host: str) -> Outcome:
    """The answer when a mailbox could not take a call: our own error has no traceback that tells a person anything."""
    text, name = str(error), type(error).__name__
    lines = (f"{name}: {text}",) if isinstance(error, MeshError) else tuple(traceback.format_exception(error))
    return Outcome(wire.RAISED, failure=Failure(rank, host, name, text, lines, "", error))
