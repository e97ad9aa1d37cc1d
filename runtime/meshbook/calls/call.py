"""A call to ranks: the request, and the open call as the controller keeps it until every rank has answered."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from meshbook.concurrency.future import Future
from meshbook.errors import (
    CallError,
    CallFailed,
    Failure,
    FailureKind,
    WorkerLost,
    disagreeing,
)
from meshbook.formatting import name_ranks
from meshbook.lifecycle import CALL_NEXT, CallEvent, CallPhase
from meshbook.shape.members import AS_NOW, Members
from meshbook.shape.value_mesh import ValueMesh
from meshbook.values.pickling import Pickled, loads
from meshbook.wire import messages as wire
from meshbook.wire.replies import decode_failure

OnReply: TypeAlias = Callable[[int, bool, float, Failure | None, float], None]
"""A callback for each rank that ends: rank, whether all is well, seconds in all, failure, seconds in collectives."""


class CallRequest(msgspec.Struct, frozen=True):
    """Run ``endpoint`` on every member; ``pickled`` are its arguments, ``what`` is the call's name for people."""

    endpoint: str
    members: Members
    pickled: Pickled
    what: str
    mesh: int = 0
    """The mesh of the members, by its number in the session; 0 is the controller's process."""
    mailbox: int = 0
    """The mailbox, as in `meshbook.wire.messages.calls.Call`."""
    generation: int = AS_NOW
    """The generation of the members' ranks: if they get other numbers before the call arrives, it fails."""
    fail_fast: bool = True
    """Whether the call completes at the first failure, rather than when every rank has ended."""
    beside: bool = False
    """Whether other messages to the mailbox may be handled while this one is."""
    reply: bool = True
    """Whether ranks answer. If not, the future is complete at once, and a rank that ends early misses the message."""
    on_reply: OnReply | None = None


_NOTHING = object()


class Results(Mapping[int, Any]):
    """Rank to result, unpickled when it is looked at: by the user's thread, never by ours."""

    def __init__(self) -> None:
        self.raw: dict[int, tuple[bytes, Sequence[object]]] = {}
        """Rank to the head and the buffers of its result, as they came."""
        self._loaded: dict[int, object] = {}

    def __getitem__(self, rank: int) -> Any:
        value = self._loaded.get(rank, _NOTHING)
        if value is _NOTHING:
            head, buffers = self.raw[rank]
            value = self._loaded[rank] = loads(head, buffers)
            self.raw[rank] = (b"", ())
        return value

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.raw))

    def __len__(self) -> int:
        return len(self.raw)


_NOBODY: Future[Any] = Future()
_NO_RANKS: frozenset[int] = frozenset()


class OpenCall:
    """A call with the answers that have come so far; only its own methods write here.

    Owned by the controller's I/O thread; others read it to tell which ranks are silent. Its phases are
    `meshbook.lifecycle.CallPhase`; failed ranks, or a request to end it, are facts that stay.
    """

    def __init__(
        self,
        id: int,
        mesh: int,
        what: str,
        members: Members,
        future: Future[Any],
        *,
        fail_fast: bool,
        on_reply: OnReply | None = None,
        mailbox: int = 0,
        beside: bool = False,
        output: int = 0,
    ) -> None:
        self.id, self.mesh, self.what, self.members, self._future = id, mesh, what, members, future
        self.output = output
        """The id that its output goes to."""
        self.mailbox = mailbox
        """0: it runs on the main threads of its members, one after the other with others of that kind."""
        self.beside = beside
        """Other messages to the mailbox may be handled while this one is."""
        self.fail_fast, self._on_reply = fail_fast, on_reply
        self.waiting = set(members.rank_set)
        self.phase = CallPhase.OPEN if self.waiting else CallPhase.ENDED
        self.interrupts = 0
        """The number of interrupts so far (`meshbook.calls.interrupt`)."""
        # What few calls have is a constant at first: thousands may be open, and the collector looks at all there is.
        self.dropped: frozenset[int] = _NO_RANKS
        """Ranks that never began it."""
        self._disagree: frozenset[int] = _NO_RANKS
        """Ranks that are known to disagree."""
        self._on_end: deque[Callable[[], object]] | None = None
        self.results = Results()
        self.failures: tuple[Failure, ...] = ()
        self.lost: tuple[WorkerLost, ...] = ()
        self.cancelled = False
        """Whether the end of the call was asked for."""
        self.aborted = False
        """The process groups were aborted under it."""
        self._places: dict[int, str] = {}
        """The places at which ranks waited when groups were aborted."""
        self.freed: tuple[Failure, ...] = ()
        """The ranks that came back from an operation that was aborted."""
        self._failed_at = self._freed_s = 0.0
        self.hurried = False
        """Whether to wait for no more failures before the error is made."""
        self._torn: dict[str, set[int]] = {}
        """The operations that were left half done, with their ranks, as in `CallError`."""

    # ---- what comes of it -----------------------------------------------------------------------------------------

    def answer(self, reply: wire.RankReply, frames: Sequence[bytes], buffers: Sequence[object]) -> None:
        """Take one rank's answer."""
        if reply.status == wire.LOST:
            death = wire.decode_death(reply.inline)
            self.lose(WorkerLost(reply.rank, death.host, death.cause, death.log_tail), alone=death.alone)
            return
        failure = None
        if reply.status == wire.OK:
            if reply.rank not in self._disagree:  # else its value came of numbers that mean nothing
                self.results.raw[reply.rank] = frames[0] if frames else reply.inline, buffers
        else:
            failure = _failure_of(reply, frames)
            self._failed_at = self._failed_at or time.monotonic()
            if self.aborted and failure.kind is FailureKind.FREED and self._has_cause:
                self.freed += (failure,)
                self._freed_s = time.monotonic() - self._failed_at
                failure = None  # it did nothing wrong
            else:
                self.failures += (failure,)
            if reply.status == wire.DROPPED:
                self.dropped |= {reply.rank}
        self._end_on(reply.rank)
        if self._on_reply is not None:
            self._on_reply(reply.rank, reply.status == wire.OK, reply.duration_s, failure, reply.waited_s)

    def _end_on(self, rank: int) -> None:
        self.waiting.discard(rank)
        if not self.waiting and self.phase is CallPhase.OPEN:
            self.phase = CALL_NEXT[self.phase, CallEvent.ANSWERED]

    def drop(self) -> None:
        """Count all ranks that have not answered as never having begun the call: its end was asked for before."""
        for rank in tuple(self.waiting):
            self.answer(wire.RankReply(rank, wire.DROPPED, 0, 0.0, None), (), ())

    def cancel(self) -> None:
        """Note that the end of the call was asked for."""
        self.cancelled = True

    def interrupt(self, stage: int) -> None:
        """The person interrupts it, for the ``stage``-th time."""
        self.interrupts = stage

    def abort(self, places: Mapping[int, str] = MappingProxyType({})) -> None:
        """The process groups are being aborted under it. places: where ranks wait, for the error to say."""
        self.aborted = True
        self.wait_at(places)

    def wait_at(self, places: Mapping[int, str]) -> None:
        """Note where ranks of it wait, for the error to say should they be freed."""
        self._places.update({rank: place for rank, place in places.items() if rank in self.waiting})

    def tear(self, rank: int, torn: Iterable[str], restored: Iterable[str]) -> None:
        """Note tensors that operations left half done on ``rank``, and those restored, as in `CallError`."""
        for text in torn:
            self._torn.setdefault(text, set()).add(rank)
        for text in restored:
            self._torn.get(text, set()).discard(rank)

    def disagree(self, ranks: Collection[int], text: str, now: float) -> bool:
        """Members entered different operations as one, so the call fails. Returns: whether that is news."""
        news = set(ranks) - self._disagree
        failures = [*self.failures, *(failure for failure in disagreeing(ranks, text) if failure.rank in news)]
        self._disagree |= news
        for rank in news:
            self.results.raw.pop(rank, None)
        self.freed += tuple(failure for failure in failures if failure.kind is FailureKind.FREED)
        self.failures = tuple(failure for failure in failures if failure.kind is not FailureKind.FREED)
        self._failed_at = self._failed_at or now
        return bool(news)

    def lose(self, error: WorkerLost, *, alone: bool = False) -> None:
        """A member ended; alone: no others are ending for the same cause."""
        if error.rank in self.waiting:
            self.hurried = self.hurried or alone
            self.lost += (error,)
            self._failed_at = self._failed_at or time.monotonic()
            self._end_on(error.rank)
            if self._on_reply is not None:
                self._on_reply(error.rank, False, 0.0, error.failures[0], 0.0)

    @property
    def disagrees(self) -> bool:
        """Whether some of its ranks entered different operations as one."""
        return bool(self._disagree)

    @property
    def _has_cause(self) -> bool:
        """Whether it is known why groups were aborted under it."""
        return bool(self.lost) or self.cancelled or any(f.kind is not FailureKind.FREED for f in self.failures)

    @property
    def failed(self) -> bool:
        return bool(self.failures or self.lost)

    @property
    def cause(self) -> str:
        """Return why it has failed, or was stopped: ``rank 1 raised ValueError``."""
        if self.lost:
            return f"{name_ranks(error.rank for error in self.lost)} ended"
        if not self.failures:
            return f"{self.what} was interrupted"
        first = self.failures[0]
        if first.kind is FailureKind.DISAGREES:
            return first.evalue.splitlines()[0]
        if first.kind is FailureKind.INTERRUPTED:
            return f"rank {first.rank} was interrupted"
        return f"rank {first.rank} raised {first.ename}"

    @property
    def is_told(self) -> bool:
        """Whether the outcome is told; with the first failure already, where the call is to fail fast."""
        return self.phase is CallPhase.CLOSED or self._future.done()

    # ---- its outcome ----------------------------------------------------------------------------------------------

    def settle(self, groups: str = "") -> None:
        """Complete the future with the answers that have come. groups: why process groups are missing, if they are."""
        if self.lost:
            self._fail(WorkerLost.of(self.lost, partial=self.results), groups)
        elif self.failures:
            self._fail(CallFailed(self.failures, partial=self.results), groups)
        elif self.freed:  # by an interrupt
            stopped = [
                freed._replace(ename="KeyboardInterrupt", evalue="", kind=FailureKind.INTERRUPTED, exception=None)
                for freed in self.freed
            ]
            self._fail(CallFailed(stopped, partial=self.results), groups)
        else:
            self._future.set_result(ValueMesh.lazy(self.members, self.results.__getitem__))

    def _fail(self, error: CallError, groups: str) -> None:
        if self.failures or self.lost:
            error.freed = {failure.rank: self._places.get(failure.rank, _some(failure)) for failure in self.freed}
        error.freed_s, error.groups = self._freed_s, groups
        error.torn = {text: sorted(ranks) for text, ranks in self._torn.items() if ranks}
        self._future.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Complete the future with an error that is not the ranks' own."""
        if isinstance(error, CallError):
            error.partial = self.results
        self._future.set_exception(error)
        self.close(CallEvent.GIVEN_UP)

    def close(self, event: CallEvent) -> None:
        """Its outcome is told: let go of the future, which holds us, and of the listener, which may.

        The collector need not come for us then.
        """
        self.phase = CALL_NEXT[self.phase, event]
        self._future, self._on_reply = _NOBODY, None
        if self._on_end:
            self._run_on_end()

    def when_settled(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call ``callback`` with the error of the outcome, if it is one, when that is told."""
        self._future.add_done_callback(lambda future: callback(future.exception(0)))

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the call is closed, which may be later than the future's outcome. Any thread."""
        if self._on_end is None:
            self._on_end = deque()
        self._on_end.append(callback)
        if self.phase is CallPhase.CLOSED:
            self._run_on_end()

    def _run_on_end(self) -> None:
        while self._on_end:
            with contextlib.suppress(IndexError):  # the other thread was quicker
                self._on_end.popleft()()


def _some(failure: Failure) -> str:
    """Return the place of a rank that was not seen waiting."""
    return f"a collective ({failure.where})" if failure.where else "a collective"


def _failure_of(reply: wire.RankReply, frames: Sequence[bytes]) -> Failure:
    if reply.status == wire.GONE:
        return Failure(reply.rank, "", "ResultLost", reply.inline.decode(errors="replace"), (), "")
    if reply.status == wire.DROPPED:
        kind = FailureKind.INTERRUPTED
        return Failure(reply.rank, "", "KeyboardInterrupt", "cancelled before it started", (), "", kind)
    try:
        return decode_failure(frames)
    except (*wire.MALFORMED, IndexError) as error:  # the rank's own doing, which is no lie of its host
        return Failure(reply.rank, "", "PeerProtocolError", f"what it raised cannot be read here: {error}", (), "")
