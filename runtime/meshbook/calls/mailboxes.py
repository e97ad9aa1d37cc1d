"""Mailboxes of a process: an actor or a port each. Calls to them never wait for the main thread, nor it for them.

    agent ──mail lane──> reader of the mail ──handler(call, load_args, reply)──> an actor's queue, say
          <─────────────────── reply(answer), on any thread

The thread hands out calls in the order in which they have come; a handler only takes note and returns. Messages of one
sender to one mailbox come in the order of sending.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

from meshbook.calls.answer import Outcome
from meshbook.errors import MailboxClosed
from meshbook.shape.members import Region
from meshbook.wire import messages as wire

CONTROLLER_MESH, CONTROLLER = 0, Region.of({"process": 1})
"""Under which mesh, and as which member of it, workers call mailboxes of the controller's process."""

KEPT_REASONS = 1024
"""Closed mailboxes of which it is remembered why."""

CallArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

LoadArgs: TypeAlias = Callable[[], CallArguments]
"""Builds the sender's arguments, once, on the thread that calls it. Raises: LoadError, MeshError."""

ReplyTo: TypeAlias = Callable[[Outcome], None]
"""Answers the call, on any thread; what is said after the first time is dropped. To be called also where the sender
expects no answer (``call.reply``): it lets go of arguments that nobody has loaded."""


class Handler(Protocol):
    """Runs on the thread that reads the mail and must not block; what it raises becomes the reply."""

    def __call__(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None: ...


class Mailbox(NamedTuple):
    handler: Handler
    on_cancel: Callable[[wire.Call, bool], None] | None = None
    """Told that the sender wants the end of a call that is not answered, and whether it insists; must not block."""


class Mailboxes:
    """By number; numbers are given out by whoever spawns what belongs to them, and never used twice."""

    def __init__(self) -> None:
        self._open: dict[int, Mailbox] = {}
        self.numbers = self._open.keys()
        """Those that are open now."""
        self._closed: OrderedDict[int, str] = OrderedDict()
        self._rest: Mailbox | None = None

    def open(self, id: int, handler: Handler, on_cancel: Callable[[wire.Call, bool], None] | None = None) -> None:
        """Hand calls to mailbox ``id`` (not 0) to ``handler`` from now on; see `Handler` and `Mailbox`."""
        self._open[id] = Mailbox(handler, on_cancel)

    def open_rest(self, handler: Handler) -> None:
        """Hand calls to ``handler`` that are for mailboxes which have never been open: they may have come too early."""
        self._rest = Mailbox(handler)

    def close(self, id: int, why: str = "") -> None:
        """Refuse what comes from now on; calls that were handed out are still the handler's to answer. Idempotent.

        why: for the error, as in ``actor "counter" was stopped``.
        """
        if self._open.pop(id, None) is not None:
            self._closed[id] = why
            if len(self._closed) > KEPT_REASONS:
                self._closed.popitem(last=False)

    def was_open(self, id: int) -> bool:
        """Whether it is remembered that this process had a mailbox of this number, and has closed it."""
        return id in self._closed

    def find(self, id: int, rank: int) -> Mailbox:
        """Raises: MailboxClosed if there is none. rank: ours, for the error."""
        mailbox = self._open.get(id)
        if mailbox is None and id not in self._closed:
            mailbox = self._rest
        if mailbox is None:
            raise MailboxClosed(rank, id, self._closed.get(id, ""))
        return mailbox
