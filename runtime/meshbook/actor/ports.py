"""Ports: one-way channels for values, from any process to the one that made them.

port, receiver = Channel.open()
port.send(3)                       # here, or wherever the port was sent to
receiver.recv().get()              # 3
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from meshbook.actor.router import Place, Router, current_router, router_for
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future, MappedFuture
from meshbook.errors import MailboxClosed, MeshStoppedError, RanksLeft, WorkerLost
from meshbook.shape.members import Members, Region
from meshbook.values.pickling import dumps, loads
from meshbook.wire import messages as wire

R = TypeVar("R")


class Port(Generic[R]):
    """The sending end of a channel for values. Small, and works in every process of the session."""

    def __init__(self, session: str, place: Place, mailbox: int) -> None:
        self._session, self._place, self._mailbox = session, Place(*place), mailbox
        self.return_undeliverable = True
        """False: a message that can no longer be delivered is dropped in silence."""

    def send(self, obj: R) -> None:
        """Send a value; returns before it has arrived.

        Raises: SerializationError, WorkerLost, RanksLeft, MeshStoppedError.
        """
        self._send("send", obj)

    def exception(self, error: BaseException) -> None:
        """Have the receiver's next `recv` raise ``error``."""
        self._send("exception", error)

    def _send(self, endpoint: str, value: object) -> None:
        try:
            self.post(endpoint, value)
        except (MailboxClosed, MeshStoppedError, RanksLeft, WorkerLost):
            if self.return_undeliverable:
                raise

    def post(self, endpoint: str, value: object) -> None:
        """Send a value under another name than ``send``, for mailboxes that tell them apart."""
        router = router_for(self._session)
        pickled = dumps(((value,), {}), what="the value")
        if self._place == router.place:
            head, buffers = pickled.head, [bytearray(buffer) for buffer in pickled.buffers]
            mailbox = router.mailboxes.find(self._mailbox, self._place.rank)
            call = wire.Call(0, self._place.mesh, endpoint, (), mailbox=self._mailbox, reply=False)
            mailbox.handler(call, lambda: loads(head, buffers), lambda answer: None)
        else:
            mesh, rank, generation = self._place
            to = router.find(mesh, one_member(rank), generation)
            router.call(CallRequest(
                endpoint, to.members, pickled, "the value", mesh, self._mailbox, to.generation, reply=False
            ))  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, Port):
            return NotImplemented
        mine = self._session, self._place, self._mailbox
        return mine == (other._session, other._place, other._mailbox)

    def __hash__(self) -> int:
        return hash((self._session, self._mailbox))

    def __reduce__(self) -> tuple[object, ...]:
        made_of = (self._session, tuple(self._place), self._mailbox)
        return Port, made_of, {"return_undeliverable": self.return_undeliverable}

    def __repr__(self) -> str:
        return f"Port(mesh {self._place.mesh}, rank {self._place.rank})"


def one_member(rank: int) -> Members:
    """A single rank, without axes."""
    return Region.build(rank, [])


class PortReceiver(Generic[R]):
    """The receiving end of a port: values come in the order in which each sender has sent them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._come: deque[_Load[R]] = deque()
        self._asked: deque[Future[_Load[R]]] = deque()

    def recv(self) -> Future[R]:
        """Return a future of the next value. Raises, when asked: an error that was sent as an exception."""
        asked: Future[_Load[R]] = Future()
        with self._lock:
            load = self._come.popleft() if self._come else None
            if load is None:
                self._asked.append(asked)
        if load is not None:
            asked.set_result(load)
        return MappedFuture(asked, lambda load: load())

    def take(self, load: _Load[R]) -> None:
        """Add a message that has come. load: builds its value, on the thread that asks for it."""
        with self._lock:
            asked = self._asked.popleft() if self._asked else None
            if asked is None:
                self._come.append(load)
        if asked is not None:
            asked.set_result(load)

    def loader(self, endpoint: str, load_args: LoadArgs) -> _Load[R]:
        """Return a function that builds the value of a message, once."""
        lock = threading.Lock()
        loaded: list[R] = []

        def load() -> R:
            with lock:
                if not loaded:
                    (value,), _ = load_args()
                    loaded.append(value)
            if endpoint == "exception" and isinstance(error := loaded[0], BaseException):
                raise error
            return loaded[0]

        return load


_Load: TypeAlias = "Callable[[], R]"
"""Builds a value."""


class Channel(Generic[R]):
    """A port together with its receiver."""

    @staticmethod
    def open(once: bool = False) -> tuple[Port[R], PortReceiver[R]]:
        """Make a port of this process. once: it takes a single message.

        It closes when its receiver is let go of.
        """
        router = current_router()
        receiver: PortReceiver[R] = PortReceiver()
        return make_port(router, receiver, once=once), receiver


def make_port(router: Router, receiver: PortReceiver[R], *, once: bool = False) -> Port[R]:
    """A port whose messages ``receiver`` gets."""
    id = router.new_mailbox()
    wanted = weakref.ref(receiver)
    mailboxes = router.mailboxes

    def on_message(call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        to = wanted()
        if to is not None:
            to.take(to.loader(call.endpoint, load_args))
        if once:
            mailboxes.close(id, "the port was for one message")
        if call.reply or to is None:  # nobody will load it: it is let go of
            reply(Outcome(wire.OK, None, has_value=True))

    mailboxes.open(id, on_message)
    weakref.finalize(receiver, mailboxes.close, id, "its receiver is gone").atexit = False
    return Port(router.session, router.place, id)


class ResponsePort(Port[R]):
    """The port of an explicit response: a value sent on it answers the call. It can be passed on."""

    def __init__(self, reply: ReplyTo, fail: Callable[[BaseException], Outcome]) -> None:
        self._reply, self._fail, self.return_undeliverable = reply, fail, True
        self.passed_on = False
        """Whether other actors may answer, even if this actor ends."""

    def send(self, obj: R) -> None:
        self._reply(Outcome(wire.OK, obj, has_value=True, what="the response"))

    def exception(self, error: BaseException) -> None:
        self._reply(self._fail(error))

    def __reduce__(self) -> tuple[object, ...]:
        """Passed on, it is a port of this process that passes on the one message that it gets."""
        self.passed_on = True
        router = current_router()
        id, mailboxes = router.new_mailbox(), router.mailboxes

        def on_message(call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
            mailboxes.close(id, "the port was for one message")

            def pass_on() -> None:
                try:
                    (value,), _ = load_args()
                except BaseException as error:
                    self.exception(error)
                else:
                    self.exception(value) if call.endpoint == "exception" else self.send(value)

            run_in_background(pass_on)  # what loads runs the user's code

        mailboxes.open(id, on_message)
        return Port(router.session, router.place, id).__reduce__()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "Port(the caller)"
