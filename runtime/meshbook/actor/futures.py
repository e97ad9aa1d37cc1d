"""What calls to actors give back: futures whose errors speak of actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from meshbook.actor.context import context
from meshbook.actor.errors import (
    ActorError,
    ActorLostError,
    ActorNotMadeError,
    ActorStoppedError,
    ProcsStoppedError,
    SupervisionError,
    why_stopped,
)
from meshbook.actor.router import Answers, Values
from meshbook.concurrency.future import Future, MappedFuture
from meshbook.errors import CallFailed, Failure, MailboxClosed, MeshDetachedError, MeshStoppedError, WorkerLost
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.actor.identity import ActorIdentity

T = TypeVar("T")


def translate(error: BaseException, actor: ActorIdentity | str, endpoint: str) -> BaseException:
    """The error of a call to a mailbox as one of actors. actor: which; or what was asked, by its name."""
    if isinstance(error, SupervisionError):
        return error
    if isinstance(actor, str):
        return _translated(error, actor, endpoint)
    told = _translated(error, actor.name, endpoint)
    return actor.beside(told, endpoint) if isinstance(told, SupervisionError) else told


def _translated(error: BaseException, actor: str, endpoint: str) -> BaseException:
    if isinstance(error, WorkerLost):
        return ActorLostError.of_worker(error, actor)
    if isinstance(error, MeshStoppedError) and not isinstance(error, MeshDetachedError):
        return ProcsStoppedError(error.mesh)
    if isinstance(error, CallFailed) and not isinstance(error, ActorError):
        closed = [failure for failure in error.failures if failure.ename == MailboxClosed.__name__]
        if closed and len(closed) == len(error.failures):
            return ActorStoppedError(actor, _reason(closed, actor), ended_with=_restarted(closed))
        kind = ActorNotMadeError if any(failure.unmade for failure in error.failures) else ActorError
        told = kind(error.failures, f"{actor}.{endpoint}", partial=error.partial)
        told.freed, told.freed_s, told.groups = error.freed, error.freed_s, error.groups
        told.torn = error.torn
        return told
    return error


def _reason(closed: list[Failure], actor: str) -> str:
    """Why the actor has ended, where it has said so itself (`meshbook.actor.instance`)."""
    plain = why_stopped(actor)
    errors = [error for failure in closed if isinstance(error := failure.load(), MailboxClosed)]
    return next((error.why.removeprefix(f"{plain}: ") for error in errors if error.why not in ("", plain)), "")


def _restarted(closed: list[Failure]) -> tuple[int, ...]:
    """The ranks whose processes have never had the actor, none where one of them has: there it was stopped."""
    errors = [failure.load() for failure in closed]
    if any(not isinstance(error, MailboxClosed) or error.why for error in errors):
        return ()
    return tuple(sorted(failure.rank for failure in closed))


class ActorFuture(MappedFuture[Values, T], Generic[T]):
    """The outcome of a call, made of its `RequestFuture` by ``make``, on the thread that asks for it."""

    def __init__(self, source: Answers, make: Callable[[Values], T], actor: ActorIdentity | str, endpoint: str) -> None:
        """actor, endpoint: what was called, as in `translate`."""
        super().__init__(source, make)
        self._call, self._names = source, (actor, endpoint)

    def get(self, timeout: float | None = None) -> T:
        """Wait for all actors that were called.

        timeout: seconds. Raises: ActorError, SupervisionError; CallTimeout, which names the silent
        ranks; CallInterrupted if the person interrupts, and then the endpoint is interrupted where it runs.
        """
        try:
            if timeout is not None or not self._call.name_in_chain:  # as the notebook's calls
                return super().get(timeout)
            with context().waiting_for(self._call.name_in_chain):
                return super().get()
        except (CallFailed, WorkerLost, MeshStoppedError) as error:
            told = translate(error, *self._names)
            raise told from told.__cause__

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with context().waiting_for(self._call.name_in_chain if timeout is None else 0):
            error = super().exception(timeout)
        return None if error is None else translate(error, *self._names)

    def __await__(self) -> Generator[object, None, T]:
        """Wait without blocking the running asyncio loop; an interrupt reaches the actors, as with `get`."""
        try:
            with context().waiting_for(self._call.name_in_chain):
                return (yield from super().__await__())
        except (CallFailed, WorkerLost, MeshStoppedError) as error:
            told = translate(error, *self._names)
            raise told from told.__cause__
        except BaseException as error:
            from asyncio import CancelledError  # only here: who awaits has it, controllers start faster without

            if isinstance(error, CancelledError) and context().interrupted:
                self.cancel()  # who has called us does not want it any more
            raise


class Stream(Generic[T]):
    """Futures of the answers of a call, in the order in which they come: one for each actor."""

    def __init__(self, count: int, actor: ActorIdentity, endpoint: str) -> None:
        self._names = (actor, endpoint)
        self._lock = threading.Lock()
        self._parts: list[_Part[T]] = [_Part(self) for _ in range(count)]
        self._come = 0
        self._given = 0
        self.source: Answers | None = None

    def begin(self, source: Answers) -> None:
        """The call has been made."""
        self.source = source
        source.add_done_callback(self._on_end)

    def on_reply(self, rank: int, ok: bool, duration_s: float, failure: Failure | None, waited_s: float) -> None:
        """A rank has answered. On the thread that serves the sockets."""
        with self._lock:
            part = self._parts[self._come]
            self._come += 1
        part.rank, part.failure = rank, None if ok else failure
        part.set_result(None)  # type: ignore[arg-type]  # a wake-up only

    def _on_end(self, source: Future[Values]) -> None:
        """All have answered; or none will, since the mesh was stopped, say."""
        with self._lock:
            left, self._come = self._parts[self._come :], len(self._parts)
        for part in left:
            part.error = source.exception(0) or RuntimeError("the call has ended without an answer")
            part.set_result(None)  # type: ignore[arg-type]

    def value_of(self, part: _Part[T]) -> T:
        """What `_Part.get` returns. Raises: as `ActorFuture.get`."""
        assert self.source is not None
        if part.error is not None:
            raise translate(part.error, *self._names)
        call = self.source.call
        if part.failure is not None:
            lost = next((lost for lost in call.lost if lost.rank == part.rank), None)
            raise translate(lost or CallFailed([part.failure]), *self._names)
        value: T = call.results[part.rank]
        return value

    def __iter__(self) -> Iterator[Future[T]]:
        return self

    def __next__(self) -> Future[T]:
        if self._given == len(self._parts):
            raise StopIteration
        self._given += 1
        return self._parts[self._given - 1]

    def __len__(self) -> int:
        return len(self._parts)


class _Part(Future[T], Generic[T]):
    """The future of one of several answers."""

    def __init__(self, stream: Stream[T]) -> None:
        super().__init__(on_cancel=lambda: stream.source is not None and stream.source.cancel())
        self._stream = stream
        self.rank = -1
        self.failure: Failure | None = None
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        if (source := self._stream.source) is not None:
            source.serve(self.done, timeout)
        if self._final:
            return True
        return super().wait(None if until is None else max(0.0, until - time.monotonic()))

    def get(self, timeout: float | None = None) -> T:
        """Wait for it. An interrupt reaches all actors that have not answered."""
        try:
            super().get(timeout)
        except KeyboardInterrupt as pressed:
            if self._stream.source is None:
                raise
            raise self._stream.source.on_interrupt(pressed) from None
        return self._stream.value_of(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.get(timeout)
        except TimeoutError:
            if not self.done():
                raise
        except Exception as error:
            return error
        return None


def only_value(values: ValueMesh[T]) -> T:
    """The value of the one member."""
    return values.values()[0]
