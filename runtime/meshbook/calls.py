"""A call from its start until every rank has answered, as the controller keeps it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from meshbook import wire
from meshbook.errors import (
    CallError,
    CallFailed,
    CallInterrupted,
    CallTimeout,
    Failure,
    MeshError,
    WorkerLost,
)
from meshbook.future import Future
from meshbook.pickling import loads
from meshbook.shape import Members
from meshbook.value_mesh import ValueMesh

T = TypeVar("T")

INTERRUPT_GRACE_S = 0.8
"""How long an interrupted call waits for its ranks to obey before it gives the prompt back."""

_decode_failure = msgspec.msgpack.Decoder(tuple[int, str, str, str, tuple[str, ...], str]).decode
_NOTHING = object()


class Results(Mapping[int, Any]):
    """Rank to result, unpickled when it is looked at: by the user's thread, never by ours."""

    def __init__(self) -> None:
        self._raw: dict[int, tuple[bytes, Sequence[Any]]] = {}
        self._loaded: dict[int, Any] = {}

    def add(self, rank: int, head: bytes, buffers: Sequence[Any]) -> None:
        self._raw[rank] = (head, buffers)

    def __getitem__(self, rank: int) -> Any:
        value = self._loaded.get(rank, _NOTHING)
        if value is _NOTHING:
            head, buffers = self._raw[rank]
            value = self._loaded[rank] = loads(head, buffers)
            self._raw[rank] = (b"", ())
        return value

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._raw))

    def __len__(self) -> int:
        return len(self._raw)


_NOBODY: Future[Any] = Future()


class OpenCall:
    """Owned by the controller's I/O thread; others read it to tell who is silent."""

    __slots__ = (
        "_ended",
        "fail_fast",
        "failures",
        "future",
        "id",
        "lost",
        "members",
        "mesh",
        "on_reply",
        "results",
        "waiting",
        "what",
    )

    def __init__(
        self,
        id: int,
        mesh: int,
        what: str,
        members: Members,
        future: Future[Any],
        *,
        fail_fast: bool,
        on_reply: Callable[[int, bool, float, Failure | None], None] | None,
    ) -> None:
        self.id, self.mesh, self.what, self.members, self.future = id, mesh, what, members, future
        self.fail_fast, self.on_reply = fail_fast, on_reply
        self.waiting = set(members.ranks())
        self._ended: Future[None] | None = None
        self.results = Results()
        self.failures: list[Failure] = []
        self.lost: list[WorkerLost] = []

    def answer(self, reply: wire.RankReply, frames: Sequence[bytes], buffers: Sequence[Any]) -> None:
        """Take one rank's answer."""
        self.waiting.discard(reply.rank)
        failure = None
        if reply.status == wire.OK:
            self.results.add(reply.rank, frames[0] if frames else reply.inline, buffers)
        else:
            failure = _failure_of(reply, frames)
            self.failures.append(failure)
        if self.on_reply is not None:
            self.on_reply(reply.rank, failure is None, reply.duration_s, failure)

    def lose(self, error: WorkerLost) -> None:
        """A member ended."""
        if error.rank in self.waiting:
            self.waiting.discard(error.rank)
            self.lost.append(error)
            if self.on_reply is not None:
                last_lines = tuple(error.log_tail.splitlines())
                lost = Failure(error.rank, error.host, "WorkerLost", error.cause, last_lines, "")
                self.on_reply(error.rank, False, 0.0, lost)

    @property
    def failed(self) -> bool:
        return bool(self.failures or self.lost)

    def settle(self) -> None:
        """Complete the future with what has come in."""
        if self.lost:
            self.future.set_exception(WorkerLost.of(self.lost, partial=self.results))
        elif self.failures:
            self.future.set_exception(CallFailed(self.failures, partial=self.results))
        else:
            loaders = [_loader(self.results, rank) for rank in self.members.ranks()]
            self.future.set_result(ValueMesh.lazy(self.members, loaders))

    def give_up(self, error: MeshError) -> None:
        """Complete the future with an error that is not the ranks' own."""
        if isinstance(error, CallError):
            error.partial = self.results
        self.future.set_exception(error)
        self.end()

    def end(self) -> None:
        """No rank is at it any more. Lets go of the future, which holds us: the collector need not come for the two."""
        self.future = _NOBODY
        if self._ended is not None:
            self._ended.set_result(None)

    def wait_for_end(self, timeout_s: float) -> None:
        """On a user's thread: wait until no rank is at it, which may be later than the future's outcome."""
        ended: Future[None] = Future()
        self._ended = ended
        if self.future is not _NOBODY:
            with contextlib.suppress(TimeoutError):
                ended.get(timeout_s)


def _loader(results: Results, rank: int) -> Callable[[], Any]:
    return lambda: results[rank]


def _failure_of(reply: wire.RankReply, frames: Sequence[bytes]) -> Failure:
    if reply.status == wire.GONE:
        return Failure(reply.rank, "", "ResultLost", reply.inline.decode(errors="replace"), (), "")
    if reply.status == wire.DROPPED:
        return Failure(reply.rank, "", "KeyboardInterrupt", "cancelled before it started", (), "")
    return Failure(*_decode_failure(frames[0]), frames[1] if len(frames) > 1 else None)


class CallFuture(Future[T], Generic[T]):
    """The future of a call: an interrupt while waiting reaches the ranks, a timeout names the silent ones."""

    call: OpenCall

    def __init__(
        self,
        cancel: Callable[[int], None],
        where: Callable[[int, Iterable[int]], dict[int, str]],
        drive: Callable[[Callable[[], bool], float | None], None],
    ) -> None:
        super().__init__(on_cancel=self._cancel, on_timeout=self._timed_out)
        self._cancel_on_ranks, self._where, self._drive = cancel, where, drive

    def get(self, timeout: float | None = None) -> T:
        """Wait for all ranks and return their values.

        timeout: seconds. Raises: CallFailed, WorkerLost, CallTimeout, and CallInterrupted if the person interrupts.
        """
        try:
            if not self.done():
                started = time.monotonic()
                self._drive(self.done, timeout)
                timeout = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
            return super().get(timeout)
        except CallInterrupted:
            raise
        except KeyboardInterrupt:
            raise self.interrupt() from None

    def interrupt(self) -> CallInterrupted:
        """Interrupt the call on its ranks; returns who obeyed within the grace time, and where the others are."""
        waiting = set(self.call.waiting)
        self._cancel_on_ranks(self.call.id)
        self.call.wait_for_end(INTERRUPT_GRACE_S)
        stuck = set(self.call.waiting)
        places = self._where(self.call.mesh, stuck) if stuck else {}
        return CallInterrupted(waiting - stuck, places, partial=self.call.results)

    def _cancel(self) -> None:
        self._cancel_on_ranks(self.call.id)

    def _timed_out(self, timeout_s: float) -> BaseException:
        return CallTimeout(self.call.what, timeout_s, self.call.waiting, partial=self.call.results)
