"""Mailboxes of a process, one for each actor or port; the calls that come to them; and the answers.

    agent ──mail lane──> reader of the mail ──handler(call, load_args, reply)──> an actor's queue, say
          <─────────────────── reply(answer), on any thread

Calls to mailboxes never wait for the main thread, nor the main thread for them. The reader hands out calls in the order
in which they have come; a handler only takes note and returns. Messages of one sender to one mailbox come in the order
of sending. Nothing here needs torch, so that the notebook need not import it to answer.
"""

from __future__ import annotations

import builtins
import functools
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshbook.concurrency.future import in_background
from meshbook.errors import Failure, MailboxClosed, MeshError, failure_of
from meshbook.shape.members import Region
from meshbook.values.main_names import ATOMS
from meshbook.values.pickling import Pickled, dumps, dumps_bounded
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer
from meshbook.wire.replies import encode_failure


class Outcome(NamedTuple):
    """A value, or a failure."""

    status: int
    value: object = None
    has_value: bool = False
    failure: Failure | None = None
    pickled: Pickled | None = None
    """The value's pickle, where it is known already."""
    what: str = "the result"
    """The name of the value in an error that says it cannot travel."""
    position: int = 0
    """The position among values of equal size that are to be joined."""


Packed: TypeAlias = tuple[int, list[Buffer], bytes, wire.SegmentRef | None]
"""An outcome as it travels: its status, frames, head where that is small, and large buffers in shared memory."""

EXCEPTION_MAX_BYTES = 1 << 16
EXCEPTION_S = 1.0
"""An exception whose pickle is larger, or takes longer, stays on its rank; its text always travels."""


def pack_failure(failure: Failure) -> list[Buffer]:
    """The payload of a reply that failed: its text, and the exception if that can travel."""
    try:
        fields = encode_failure(failure)
    except Exception as problem:  # whoever waits needs some answer
        why = f"what was raised cannot travel: {type(problem).__name__}"
        return [encode_failure(Failure(failure.rank, failure.host, "SerializationError", why, (why,), ""))]
    pickled = _pickled_exception(failure.exception)
    return [fields] if pickled is None or pickled.buffers else [fields, pickled.head]


def _pickled_exception(error: object) -> Pickled | None:
    """Return the pickle of an exception; None if it cannot travel, or its own code takes too long to pickle it."""
    pickle = functools.partial(dumps_bounded, error, EXCEPTION_MAX_BYTES)
    is_plain = type(error) in ATOMS or (
        isinstance(error, Exception)
        and getattr(builtins, type(error).__name__, None) is type(error)
        and all(type(each) in ATOMS for each in (*error.args, *vars(error).values()))
    )
    try:
        return pickle() if is_plain else in_background(pickle).get(EXCEPTION_S)
    except BaseException:  # a user's class may raise anything when it is pickled
        return None


def pack(
    answer: Outcome,
    write: Callable[[Sequence[Buffer]], wire.SegmentRef],
    describe: Callable[[BaseException], Failure],
) -> Packed:
    """Make a reply of an outcome; where its value cannot travel, the one that says so.

    write: copies large buffers into shared memory. describe: makes a failure of an error that pickling a value raises.
    """
    if answer.failure is not None:
        return answer.status, pack_failure(answer.failure), b"", None
    if not answer.has_value:
        return answer.status, [], b"", None
    try:
        pickled = answer.pickled or dumps(answer.value, what=answer.what)
        head, large = pickled.head, pickled.buffers
        frames: list[Buffer]
        inline, frames = (head, []) if len(head) <= wire.INLINE_MAX_BYTES else (b"", [head])
        return answer.status, frames, inline, write(large) if large else None
    except BaseException as error:
        return wire.RAISED, pack_failure(describe(error)), b"", None


class Unavailable(tuple[object, ...]):
    """A stand-in for buffers that could not be read here; iterating over it raises the reason."""

    def __new__(cls, error: MeshError) -> Unavailable:
        made = super().__new__(cls, (None,))
        made.error = error
        return made

    error: MeshError

    def __iter__(self) -> Iterator[object]:
        raise self.error


CONTROLLER_MESH, CONTROLLER = 0, Region.of({"process": 1})
"""The mesh and the member by which workers call mailboxes of the controller's process."""

KEPT_REASONS = 1024
"""Closed mailboxes of which it is remembered why."""

CallArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

LoadArgs: TypeAlias = Callable[[], CallArguments]
"""Builds the sender's arguments, once, on the thread that calls it. Raises: LoadError, MeshError."""

ReplyTo: TypeAlias = Callable[[Outcome], None]
"""Answers the call, on any thread; later answers are dropped. To be called also where the sender
expects no answer (``call.reply``): it lets go of arguments that nobody has loaded."""


Handler: TypeAlias = Callable[[wire.Call, LoadArgs, ReplyTo], None]
"""Runs on the thread that reads the mail and must not block; an error that it raises becomes the reply."""


class Mailbox(NamedTuple):
    handler: Handler
    on_cancel: Callable[[wire.Call, bool], None] | None = None
    """Told that the sender wants the end of a call that is not answered, and whether it insists; must not block."""


class Mailboxes:
    """The mailboxes of a process by number. The spawning process gives the numbers; none is used twice."""

    def __init__(self) -> None:
        self._open: dict[int, Mailbox] = {}
        self.numbers = self._open.keys()
        """The numbers of the open mailboxes."""
        self._closed: OrderedDict[int, str] = OrderedDict()
        self._rest: Mailbox | None = None

    def open(self, id: int, handler: Handler, on_cancel: Callable[[wire.Call, bool], None] | None = None) -> None:
        """Hand calls to mailbox ``id`` (not 0) to ``handler`` from now on; see `Handler` and `Mailbox`."""
        self._open[id] = Mailbox(handler, on_cancel)

    def open_rest(self, handler: Handler) -> None:
        """Hand calls to ``handler`` that are for mailboxes which have never been open: they may have come too early."""
        self._rest = Mailbox(handler)

    def close(self, id: int, why: str = "") -> None:
        """Refuse messages from now on; the handler still answers the calls that it has. Idempotent.

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


class IncomingCall:
    """A call with its arguments and its reply, as a handler gets it; each part is used once, on any thread."""

    __slots__ = ("_came_at", "_discard", "_left", "_on_cancel", "call")

    def __init__(
        self,
        call: wire.Call,
        load: Callable[[], CallArguments],
        discard: Callable[[], object],
        send: Callable[[Outcome, float], object],
    ) -> None:
        """load: builds the arguments. discard: lets go of them. send: takes the answer and the time since we began."""
        self.call = call
        self._on_cancel: Callable[[wire.Call, bool], None] | None = None
        """The callback of its mailbox, which may have closed since."""
        self._left: dict[str, Callable[..., Any]] = {"load": load, "send": send}
        """The parts that were not used yet: the interpreter never splits a `dict.pop`, so each goes to one thread."""
        self._discard = discard
        self._came_at = time.monotonic()

    def deliver(self, mailbox: Mailbox) -> None:
        """Hand the call to its mailbox. Raises: the errors of the handler."""
        self._on_cancel = mailbox.on_cancel
        mailbox.handler(self.call, self.load, self.reply)

    def cancel(self, *, insist: bool) -> None:
        """Tell the mailbox that the sender wants the end of the call."""
        if self._on_cancel is not None:
            self._on_cancel(self.call, insist)

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
        """The calls that wait for their reply; the sender of the reply takes its call out."""

    def deliver(self, incoming: IncomingCall, rank: int, host: str) -> Exception | None:
        """Hand a call to its mailbox; an error of that is the answer, and returned. rank, host: ours."""
        call = incoming.call
        if call.reply:
            self.open[call.origin, call.id] = incoming
        try:
            incoming.deliver(self.boxes.find(call.mailbox, rank))
        except Exception as error:
            incoming.reply(refusal(error, rank, host))
            return error
        return None

    def cancel(self, cancel: wire.Cancel) -> None:
        """Tell the mailbox of a call that has no answer yet."""
        if (incoming := self.open.get((cancel.origin, cancel.call))) is not None:
            incoming.cancel(insist=cancel.insist)

    def give_up(self, is_meant: Callable[[wire.Call], bool], answer: Outcome) -> None:
        """Answer the open calls that have lost their handler. Any thread."""
        for incoming in list(self.open.values()):
            if is_meant(incoming.call):
                incoming.reply(answer)


def refusal(error: Exception, rank: int, host: str) -> Outcome:
    """Return the answer of a mailbox that could not take a call."""
    return Outcome(wire.RAISED, failure=describe(error, rank, host))


def describe(error: BaseException, rank: int, host: str) -> Failure:
    """Make a failure of an error in our own code, with a traceback unless it is a MeshError, which explains itself."""
    return failure_of(error, rank, host, None if isinstance(error, MeshError) else traceback.format_exception(error))
