"""Copies between a buffer and memory of this process, on two roads; and the buffers that this process keeps for others.

    memory of the machine    the owner's memory, also this process's own, is within reach
                             (`meshbook.actor.buffers.memory`); the owner takes no part
    a stream between hosts   a connection for one copy (`meshbook.actor.buffers.stream`); where there can be none, and
                             for small copies, the mail of the session, in pieces

The owner's side of the stream runs on side threads, even while the owner is busy: requests come to a mailbox of each
buffer. Memory is kept alive until its buffer is dropped.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

from meshbook.actor.buffers.memory import (
    Memory,
    NotDirect,
    RemoteAddress,
    access,
    copy,
    own_table,
)
from meshbook.actor.buffers.stream import (
    BufferListener,
    Rendezvous,
    Silence,
    StreamError,
    UnreachableError,
    connect,
    receive_all,
    send_all,
)
from meshbook.actor.endpoint import only_value
from meshbook.actor.errors import ActorLostError, BufferDroppedError, BufferSizeError
from meshbook.actor.ports import one_member
from meshbook.actor.router import Answers, Place, Router, router_for
from meshbook.calls.call import CallRequest
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo, refusal
from meshbook.concurrency.background import SerialQueue, run_in_background
from meshbook.concurrency.future import Future
from meshbook.errors import CallFailed, CallTimeout, MailboxClosed, WorkerLost
from meshbook.formatting import format_bytes
from meshbook.system.memory_files import Bytes
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire

READ, WRITE, DROP = "read", "write", "drop"
STREAM = "stream "
"""The prefix of READ or WRITE for a copy over a connection (`meshbook.actor.buffers.stream`)."""

DROPPED = "the buffer was dropped"
"""The reason with which a buffer's mailbox is closed."""


class KeptBuffer:
    """A buffer of this process, which its mailbox keeps; it is reached by ``spot`` and ``mailbox``."""

    def __init__(self, router: Router, memory: Memory) -> None:
        self._router = router
        self._table = own_table()
        self.spot = self._table.add(memory.address)
        self._dropping = threading.Lock()
        """A lock that the first drop takes for good."""
        self.memory: Memory | None = memory
        """The memory; None once the buffer was dropped."""
        self._lane = SerialQueue()
        self.mailbox = router.new_mailbox()
        router.mailboxes.open(self.mailbox, self._handle)

    def _handle(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        """Serve a request that came by mail. Runs on the thread of the mail."""
        if call.endpoint.startswith(STREAM):
            run_in_background(lambda: self._serve(call, load_args, reply))  # they wait for each other's networks
        else:
            self._lane.add(lambda: self._serve(call, load_args, reply))

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        try:
            reply(Outcome(wire.OK, self._do(call, load_args), has_value=True, what="a piece of the buffer"))
        except Exception as error:
            reply(refusal(error, self._router.place.rank, socket.gethostname()))

    def _do(self, call: wire.Call, load_args: LoadArgs) -> object:
        if call.endpoint == DROP:
            self.drop()
            return None
        args, _ = load_args()
        if (memory := self.memory) is None:  # dropped since the call came
            self._router.mailboxes.find(self.mailbox, self._router.place.rank)
            raise AssertionError("its mailbox is closed before its memory goes")
        streamed = call.endpoint.startswith(STREAM)
        offset = 0 if streamed else args[0]
        size_bytes = len(args[1]) if call.endpoint == WRITE else args[1]
        if not 0 <= offset <= offset + size_bytes <= memory.size_bytes:
            raise BufferSizeError(f"bytes {offset} to {offset + size_bytes} of a buffer of {memory.size_bytes}")
        view = memory.view(offset, size_bytes)
        if streamed:
            self._stream(view.data, call.endpoint.removeprefix(STREAM), Rendezvous(*args[0]))
            return None
        if call.endpoint == READ:
            return view.copy()  # what is packed into the reply may be dropped meanwhile
        view[:] = args[1]
        return None

    def _stream(self, view: memoryview, kind: str, door: Rendezvous) -> None:
        try:
            with connect(door) as connection:
                (send_all if kind == READ else receive_all)(connection, view, Silence())
        except OSError as error:
            raise StreamError(f"the connection to {door.address} broke: {error}") from error

    def drop(self) -> None:
        """Release the memory once no access is under way. Any thread; idempotent."""
        self._router.mailboxes.close(self.mailbox, DROPPED)
        if self._dropping.acquire(blocking=False):
            if self._table.drop(self.spot.slot):
                self.memory = None
            else:

                def end_later() -> None:
                    self._table.drop(self.spot.slot, wait=True)
                    self.memory = None

                run_in_background(end_later)


PIECE_BYTES = 4 << 20
UNDER_WAY = 4
"""The number of pieces that are asked for ahead: they fill the link of two hosts, and delay other messages little."""


STREAM_MIN_BYTES = 1 << 16
"""The size up to which a copy goes by mail, in one piece."""

_unreachable: set[str] = set()
"""The machines (`RemoteAddress.memory`) to which connections have failed."""


AT_ONCE_MAX_BYTES = 1 << 20
"""The size up to which the asking thread makes a copy itself, if the owner's memory is within reach."""


class TransferTarget(NamedTuple):
    """The facts that a handle has of its buffer."""

    session: str
    place: Place
    mailbox: int
    size_bytes: int
    owner: str
    spot: RemoteAddress

    @property
    def name(self) -> str:
        return f"the buffer of {format_bytes(self.size_bytes)} of {self.owner}"


class TransferFuture(Future[None]):
    """An interrupt while waiting ends the copy; await it or `get` it."""

    def get(self, timeout: float | None = None) -> None:
        """Wait until it is done. Raises: BufferDroppedError, SupervisionError, CallTimeout; KeyboardInterrupt."""
        try:
            super().get(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise


class Transfer:
    """The first ``size_bytes`` of a buffer from or to memory of this process."""

    def __init__(
        self, target: TransferTarget, memory: Memory, size_bytes: int, kind: str, timeout_s: float | None
    ) -> None:
        """kind: READ or WRITE."""
        self._target = target
        self.memory = memory
        self.size_bytes = size_bytes
        self._kind = kind
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._cancelled = False
        self.future = TransferFuture(on_cancel=self._cancel)

    def _cancel(self) -> None:
        self._cancelled = True

    def begin(self) -> TransferFuture:
        """Make the copy, on this thread if that is quick, else aside."""
        if self.size_bytes > AT_ONCE_MAX_BYTES or not self.run(at_once=True):
            run_in_background(self.run)
        return self.future

    def run(self, *, at_once: bool = False) -> bool:
        """Make the copy on this thread and complete `future`.

        at_once: only if that takes no help of the owner; returns whether that was so.
        """
        try:
            try:
                with access(self._target.spot):  # without the owner's help
                    write = self._kind == WRITE
                    copy(self._target.spot, self.memory.address, self.size_bytes, write=write, check=self._check)
            except NotDirect:
                if at_once:
                    return False
                if not self._by_stream():
                    self._by_mail()
        except BaseException as error:
            if at_once and not isinstance(error, Exception):
                raise
            self.future.set_exception(error)
        else:
            self.future.set_result(None)
        return True

    def _check(self) -> None:
        """Look whether it is still wanted. Raises: CancelledError, CallTimeout."""
        if self._cancelled:
            from concurrent.futures import CancelledError

            raise CancelledError
        self._left_s()

    def _left_s(self) -> float | None:
        if self._deadline is None:
            return None
        if (left := self._deadline - time.monotonic()) <= 0:
            raise self._late()
        return left

    def _late(self) -> CallTimeout:
        return CallTimeout(f"{self._kind} of {self._target.name}", self._timeout_s or 0.0, [self._target.place.rank])

    def _by_stream(self) -> bool:
        """Copy over a connection; return False if there can be none, or the copy is too small for one."""
        if self.size_bytes <= STREAM_MIN_BYTES or self._target.spot.memory in _unreachable:
            return False
        try:
            listener = BufferListener()
        except OSError:
            return False
        with contextlib.closing(listener):
            future = begin(self._target, STREAM + self._kind, (tuple(listener.door), self.size_bytes))
            broken = False
            try:
                try:
                    self._stream(listener, future)
                except (OSError, StreamError):
                    broken = True
                    listener.close()  # and let the owner say what has become of it
                finish(self._target, future, self._left_s())
            except CallTimeout:
                raise self._late() from None
            except UnreachableError:
                _unreachable.add(self._target.spot.memory)
            except StreamError:
                pass
            else:
                return not (broken and self._kind == READ)  # the owner knows what it has sent, not what has come
        return False

    def _stream(self, listener: BufferListener, future: Answers) -> None:
        """Raises: OSError, StreamError, and the errors of `finish` once the owner has failed."""

        def look(done: int) -> None:
            self._check()
            if future.done() and future.exception(0) is not None:
                finish(self._target, future, 0)

        with listener.accept(look) as connection:
            move = receive_all if self._kind == READ else send_all
            move(connection, self.memory.view(0, self.size_bytes).data, look)

    def _by_mail(self) -> None:
        """Copy in pieces by mail, several at once. An empty piece asks whether the buffer is there."""
        pieces = deque(range(0, max(self.size_bytes, 1), PIECE_BYTES))
        asked: deque[tuple[int, int, Answers]] = deque()
        while pieces or asked:
            while pieces and len(asked) < UNDER_WAY:
                offset = pieces.popleft()
                size_bytes = min(PIECE_BYTES, self.size_bytes - offset)
                part = size_bytes if self._kind == READ else self.memory.view(offset, size_bytes)
                asked.append((offset, size_bytes, begin(self._target, self._kind, (offset, part))))
            offset, size_bytes, future = asked.popleft()
            try:
                value = finish(self._target, future, self._left_s())
            except CallTimeout:
                raise self._late() from None
            self._check()
            if self._kind == READ:
                assert value is not None
                self.memory.view(offset, size_bytes)[:] = value


def begin(target: TransferTarget, endpoint: str, args: tuple[object, ...]) -> Answers:
    """Send a request to the owner; `finish` waits for the answer."""
    what = f"{endpoint} of {target.name}"
    pickled = dumps((args, {}), what=what)
    try:
        router, place = router_for(target.session), target.place
        to = router.find(place.mesh, one_member(place.rank), place.generation)
        return router.call(CallRequest(endpoint, to.members, pickled, what, place.mesh, target.mailbox, to.generation))
    except WorkerLost as lost:
        raise ActorLostError.of_worker(lost, "") from None


def finish(target: TransferTarget, future: Answers, timeout_s: float | None) -> Bytes | None:
    """Wait for the owner's answer. Raises: BufferDroppedError, SupervisionError, CallTimeout, MeshStoppedError."""
    try:
        answer: Bytes | None = only_value(future.get(timeout_s))
        return answer
    except WorkerLost as lost:
        raise ActorLostError.of_worker(lost, "") from None
    except CallFailed as failed:
        failure = failed.failures[0]
        error = failure.load()
        if isinstance(error, StreamError):
            raise error from None
        if not isinstance(error, MailboxClosed):
            raise
        if error.why == DROPPED:
            raise BufferDroppedError(target.name) from None
        cause = f"the process of {target.name} ended, and the rank was started again since, without it"
        raise ActorLostError(failure.rank, failure.host, cause) from None
