"""Operations of process groups as their callers hold them: waits that a signal or an abort ends.

torch's `Work.wait` blocks in C++, where neither reaches it. `CollectiveWork` waits in short steps instead; gloo closes
the connection when a step of a send or a receive runs out, so `PeerWork` begins and awaits those on a side thread.

Waits for the future of an operation block in C++ as well. Such futures are ours: they end with the operation, or when
the groups are aborted. DDP waits for them in backward passes, where no signal gets through. So the thread that runs a
pass is known (`watch_backward`), and its waits can be reported and ended from the control thread. torch wraps the
error of a future in text, which becomes the error again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.autograd
import torch.distributed as dist

from meshbook.concurrency.background import peeking, refuse_in_peek, run_in_background
from meshbook.concurrency.patches import patch
from meshbook.errors import GroupAborted
from meshbook.groups.group_state import LOST_CONNECTION, STEP_S, GroupState
from meshbook.groups.progress import Operation
from meshbook.groups.reach import LOOK_S
from meshbook.torch_internals import engine_run_backward, queue_callback

if TYPE_CHECKING:
    from meshbook.groups.backend_group import BackendGroup
    from meshbook.groups.operands import Landing
    from meshbook.groups.records import Operands

_STEP = timedelta(seconds=STEP_S)
_STEP_TIMED_OUT = "Operation timed out!"
"""The text of torch's error when a wait ends before the operation."""
_NO_TIMEOUT = timedelta(0)


class AbortableWork(dist.Work):
    """An operation as its caller holds it. Numbered per group, or per peer and direction."""

    peer: int | None = None
    since = 0.0
    """The time when the wait began, monotonic."""
    begun = 0.0
    """The time when the operation began, if the rank is profiled."""
    torn = ""
    """A text on the tensors that it may have left half done, for good."""
    _given_up = _is_noted = has_timed_out = False
    _error: BaseException | None = None
    """The error with which it has ended."""

    def __init__(self, inner: BackendGroup, operation: str, number: int, raw: dist.Work | None = None) -> None:
        """raw: C++'s side of it, where that has begun."""
        super().__init__()
        self.inner, self.operation, self.number = inner, operation, number
        if raw is not None:
            self._raw = raw
        if inner.guard.log is not None:
            self.begun = time.monotonic()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the end of the operation.

        Raises: GroupAborted, KeyboardInterrupt; RuntimeError if the operation failed or after ``timeout``.
        """
        if self._given_up:
            raise GroupAborted(self.inner.dead or "this operation was given up")
        if self._ready():
            self._finish()
            self._note_end()
            return True
        inner, thread = self.inner, get_ident()
        if thread in peeking:
            refuse_in_peek(f"the wait for {self.operation}")
        guard = inner.guard
        waits, self.since = guard.waits, time.monotonic()
        waits[thread] = self
        try:
            limit_s = timeout.total_seconds()
            self._wait(limit_s if limit_s > 0 else inner.timeout_s)
        except BaseException as error:
            if not self.is_completed():
                self.give_up()
                self.note_torn()
            elif self._has_failed():  # as its connections were closed, while the reason was on its way to us
                self._note_failed(error)
            if isinstance(error, GroupAborted):
                inner.users.told()
                error.torn = self.torn
            raise
        finally:
            waits.pop(thread, None)
            guard.add_wait(thread, self.since, self.operation)
        if self.begun:
            self._note_end()
        return True

    def _note_end(self) -> None:
        """Its end was seen: put it into the log, once, if it began in it."""
        guard, begun = self.inner.guard, self.begun
        if guard.log is not None and begun:
            self.begun = 0.0
            where = (guard.epoch, self.inner.name, self.operation, self.number, self.peer is None)
            guard.log.add_operation(Operation(*where, begun, time.monotonic()))

    def synchronize(self) -> None:
        self.wait()

    def give_up(self) -> None:
        """Note that no thread waits for the operation any more, and that it may never end."""
        if not self._given_up:
            self._given_up = True
            self.inner.failures.note_given_up(self.operation)

    def note_torn(self) -> None:
        """Mark it as abandoned or failed: its output may be torn."""

    def _note_failed(self, error: BaseException) -> None:
        """Note, once, that it does nothing for the other members any more."""
        if not self._is_noted:
            self._is_noted = True
            self.note_torn()
            self.inner.failures.note(self.operation, self.number, self.peer, error)

    def _has_failed(self) -> bool:
        """Whether an operation that has ended did so with an error that nothing else notes."""
        return False

    def _ready(self) -> bool:
        return self.is_completed()

    def _wait(self, timeout_s: float) -> None:
        """timeout_s: on the guard's clock."""
        raise NotImplementedError

    def _time_out(self, timeout_s: float) -> NoReturn:
        self.has_timed_out = True
        raise RuntimeError(f"{self.operation}: Operation timed out after {timeout_s:g} s")

    def _finish(self) -> None:
        raise NotImplementedError

    def _raise_failed(self, error: BaseException) -> NoReturn:
        """Raise for a failed operation: the reason of the abort, if there is or soon will be one."""
        inner = self.inner
        self._note_failed(error)
        if not inner.dead:
            inner.guard.await_reason(str(error))
        if reason := inner.dead or inner.guard.reason:
            raise GroupAborted(reason) from error
        raise error


class CollectiveWork(AbortableWork):
    """A collective, under way in a thread of gloo or on a CUDA stream."""

    operands: Operands | None = None
    on_stream = False
    """Whether it is one of CUDA's, which the device waits for."""
    _future: torch.futures.Future[object] | None = None
    _gate: torch.futures.Future[None]
    _opened: threading.Event
    """Whether the gate is open."""

    def is_completed(self) -> bool:
        return self._raw.is_completed()

    def is_success(self) -> bool:
        return self._raw.is_success()

    def _has_failed(self) -> bool:
        if self.on_stream:
            return False
        try:
            self._take_result()  # `is_success` would warn of its age on the rank's stderr
        except Exception:
            return True
        return False

    def _take_result(self) -> None:
        """Raise the error of an operation that has ended; the same one each time.

        For an operation of CUDA this makes the current stream wait. An error that was Python's first, as the store's
        are, C++ can raise once: the second time ends the process.
        """
        if self._error is not None:
            raise self._error
        self._keep_error(self._raw.wait)

    def _keep_error(self, ask: Callable[..., Any], *args: object) -> Any:
        """Return the answer of C++. Raises: its error, which is kept."""
        try:
            return ask(*args)
        except Exception as error:
            if str(error) != _STEP_TIMED_OUT:
                self._error = error
            raise

    def exception(self) -> object:
        return self._raw.exception()

    def result(self) -> list[torch.Tensor]:
        return self._raw.result()

    def note_torn(self) -> None:
        operands = self.operands
        torn = self.inner.note_torn(self.operation, self.number, operands, self._raw, True)
        self.torn = torn if operands is not None and operands[1] is None else ""

    def block_current_stream(self) -> None:
        self._raw.block_current_stream()

    def get_future(self) -> torch.futures.Future[object]:
        """A future of the results that also ends, with an error, when the groups are aborted."""
        if self.on_stream:
            return self._raw.get_future()
        if self._future is None:
            raw, self._gate = self._raw.get_future(), torch.futures.Future()
            self._opened = threading.Event()
            self._future = self._gate.then(lambda _: self._outcome(raw))
            self.inner.guard.futures[self] = time.monotonic()
            _expect_wait(self.inner.guard)
            self._open_gate_after(raw)
            if self.inner.dead:
                self.fail_future()
        return self._future

    def _open_gate_after(self, raw: torch.futures.Future[object]) -> None:
        raw.add_done_callback(lambda _: self._open_gate())

    def fail_future(self) -> None:
        """The groups were aborted, or the call interrupted: end the future, if the operation has not done it."""
        if not self.is_completed():
            self.give_up()
        self._open_gate()

    def _open_gate(self) -> None:
        self.inner.guard.futures.pop(self, None)
        self.inner.forget_completed()
        self._note_end()
        with contextlib.suppress(RuntimeError):  # opened already
            self._gate.set_result(None)
        self._opened.set()

    def _outcome(self, raw: torch.futures.Future[object]) -> object:
        if self._given_up:
            raise GroupAborted(self.inner.dead or "the operation was interrupted")
        if self._error is not None:
            raise self._error
        return self._keep_error(raw.value)

    def _ready(self) -> bool:
        return self.on_stream or (self.inner.dead != "" and self.is_completed())  # else `_wait` finds out

    def _finish(self) -> None:
        try:
            self._take_result()
        except RuntimeError as error:
            self._raise_failed(error)
        finally:
            self.inner.forget_completed()

    def _wait(self, timeout_s: float) -> None:
        raw, inner, deadline = self._raw, self.inner, 0.0
        while not inner.dead:
            try:
                self._wait_a_step()
            except RuntimeError:
                if raw.is_completed():  # it failed, or ended just after the step
                    self._finish()
                    return
                now = inner.guard.clock()
                deadline = deadline or now - STEP_S + timeout_s  # most end within the first step, and need none
                if now > deadline:
                    self._time_out(timeout_s)
                inner.guard.roads.check(self.operation)
            else:
                inner.forget(raw)
                return
        raise GroupAborted(inner.dead)

    def _wait_a_step(self) -> None:
        """Raises: the operation's error, and RuntimeError where it has not ended."""
        if self._future is not None and not self._opened.wait(STEP_S):
            raise RuntimeError(_STEP_TIMED_OUT)
        if self._error is not None:  # its future has taken it
            raise self._error
        self._keep_error(self._raw.wait, _STEP)


class AsideWork(CollectiveWork):
    """A collective of gloo that is awaited on a thread of its own.

    One that is made of others (reduce_scatter), whose wait takes no timeout; and one that works on copies, which are
    copied back at its end, also where nobody waits for it.
    """

    def __init__(self, inner: BackendGroup, operation: str, number: int, raw: dist.Work, landing: Landing = ()) -> None:
        super().__init__(inner, operation, number, raw)
        self._done = threading.Event()
        self._landing, self._to_land, self._land_one = landing, landing, threading.Lock()
        run_in_background(self._await_raw)

    def _await_raw(self) -> None:
        try:
            self._raw.wait()
            self._land()
        except BaseException as error:
            self._error = error
            self._note_failed(error)
        self._done.set()
        if self._future is not None:
            self._open_gate()

    def _open_gate_after(self, raw: torch.futures.Future[object]) -> None:
        if self._done.is_set():  # else `_await_raw` opens it, which alone takes the error
            self._open_gate()

    def _land(self) -> None:
        """Copy back, once; as C++ would, past autograd and its counts of versions."""
        with self._land_one, torch.inference_mode():
            left, self._to_land = self._to_land, ()
            for tensor, copy in left:
                tensor.data.copy_(copy)

    def result(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self._landing] or super().result()

    def _outcome(self, raw: torch.futures.Future[object]) -> object:
        value = super()._outcome(raw)
        self._land()
        return [tensor for tensor, _ in self._landing] or value

    def is_completed(self) -> bool:
        return self._done.is_set()

    _ready = is_completed

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _finish(self) -> None:
        self.inner.forget_completed()
        if self._error is not None:
            self._raise_failed(self._error)

    def _wait(self, timeout_s: float) -> None:
        clock = self.inner.guard.clock
        deadline = clock() + timeout_s
        while not self._done.wait(STEP_S):
            if self.inner.dead:
                raise GroupAborted(self.inner.dead)
            if clock() > deadline:
                self._time_out(timeout_s)
            self.inner.guard.roads.check(self.operation)
        self._finish()


class PeerWork(AbortableWork):
    """A send, a receive, or a call that blocks in C++: begun and awaited on a side thread."""

    def __init__(
        self, inner: BackendGroup, operation: str, number: int, peer: int | None, begin: Callable[[], dist.Work | None]
    ) -> None:
        super().__init__(inner, operation, number)
        self.peer = peer
        self._begin: Callable[[], dist.Work | None] | None = begin
        self._begun: dist.Work | None = None
        self._done = threading.Event()
        self.ended = False
        """Whether C++ is done with it, unlike `is_completed` also after an abort."""

    def run(self) -> None:
        """Begin the operation and wait for it, on the side thread."""
        begin, self._begin = self._begin, None
        try:
            if self.inner.dead:
                self._error = GroupAborted(self.inner.dead)  # never begun: whoever waits must not take it for done
            elif begin is not None and (raw := begin()) is not None:
                self._begun = raw
                raw.wait()
        except BaseException as error:
            self._error = error
            self._note_failed(error)
        self.ended = True
        self.inner.open_peer_works.discard(self)
        self._done.set()

    def wake(self) -> None:
        """Free the waiters, since the groups were aborted; the side thread follows when the connection is shut."""
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.ended and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._begun.result() if self._begun is not None else []

    def source_rank(self) -> int:
        return self._source_rank()

    def _source_rank(self) -> int:
        return self._begun._source_rank() if self._begun is not None else -1

    def _wait(self, timeout_s: float) -> None:
        clock = self.inner.guard.clock
        deadline = clock() + timeout_s
        while not self._done.wait(max(STEP_S, min(deadline - clock(), self._look_s))):
            if clock() > deadline:
                self._time_out(timeout_s)
            self.inner.guard.roads.check(self.operation)
        self._finish()

    @property
    def _look_s(self) -> float:
        """Return how long it may wait at once: there are no roads to look at where there is one host."""
        return LOOK_S if self.inner.guard.roads.hosts else threading.TIMEOUT_MAX

    def _finish(self) -> None:
        if not self.ended or isinstance(self._error, GroupAborted):
            self.give_up()
            raise GroupAborted(self.inner.dead)
        if self._error is not None:
            self._raise_failed(self._error)


def _expect_wait(guard: GroupState) -> None:
    """Have the backward pass of this thread, if there is one, say when it waits for collectives only."""
    thread, computed_at = threading.get_ident(), guard.computed_at
    if thread in guard.backward and thread not in computed_at:
        computed_at[thread] = 0.0
        # callbacks run in the order in which they were added, and the one that DDP adds waits for its collectives
        queue_callback(lambda: computed_at.__setitem__(thread, time.monotonic()))


def watch_backward(guard: GroupState) -> None:
    """Tell ``guard`` of the backward passes of this process from now on. Idempotent."""

    def run_backward(*args: object, **kwargs: object) -> object:
        thread = threading.get_ident()
        if thread in guard.backward:  # a backward pass inside another, as checkpointing makes
            return engine_run_backward(*args, **kwargs)
        guard.backward.add(thread)
        try:
            return engine_run_backward(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            guard.await_reason(text)
            if GroupAborted.__name__ in text or (LOST_CONNECTION in text and guard.reason):
                raise GroupAborted(guard.reason or "the backward pass was interrupted") from None
            raise
        finally:
            guard.backward.discard(thread)
            if since := guard.computed_at.pop(thread, 0.0):
                guard.add_wait(thread, since, "the backward pass")

    patch(torch.autograd, "_engine_run_backward", run_backward)
