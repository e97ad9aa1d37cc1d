"""The futures of calls, and of cells that run on ranks.

A thread that waits for a call serves the sockets meanwhile, and passes an interrupt on to the ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshbook.calls.call import OpenCall
from meshbook.calls.interrupt import CallControl, describe_wait, interrupt
from meshbook.calls.output import OutputEvent, OutputListener, RankDone
from meshbook.concurrency import forks
from meshbook.concurrency.background import is_from_outside, peeking, refuse_in_peek
from meshbook.concurrency.future import Future
from meshbook.errors import CallInterrupted, CallTimeout
from meshbook.shape.members import Region
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.errors import CallInterrupted, Failure
    from meshbook.shape.members import Members
    from meshbook.wire import messages as wire


T = TypeVar("T")

WAIT_NOTE_S = 1.5
"""A wait that takes longer names the ranks that did not stop at an interrupt."""

_NO_OUTCOME = None, TimeoutError(), None


class RequestFuture(Future[T], Generic[T]):
    """The future of a call in any process: an interrupt while waiting cancels the call, a timeout names silent ranks.

    cancel: asks for the end of the call of that id. open_call: makes the call of which this is the future.
    """

    name_in_chain = 0
    """The name of the call in `wire.Call.chain`."""

    def __init__(self, cancel: Callable[[int], object] | None, open_call: Callable[[Future[T]], OpenCall]) -> None:
        super().__init__()
        self._cancel_call, self.call = cancel, open_call(self)
        self._timeout_s: float | None = None
        """The timeout that the caller of `get` gave; a part of the wait is done elsewhere."""

    def get(self, timeout: float | None = None) -> T:
        """Wait for all ranks and return their values.

        timeout: seconds. Raises: CallFailed, WorkerLost, CallTimeout; KeyboardInterrupt, at once; errors of other
        signal handlers, as of a time limit: these interrupt the call, too.
        """
        self._timeout_s = timeout
        try:
            if not self._final:
                if peeking:
                    refuse_in_peek(f"a wait for {self.call.what or 'a call'}")
                timeout = self._serve(timeout)
            value, error, _ = self._final.get(0, _NO_OUTCOME)
            return value if error is None else super().get(timeout)
        except CallInterrupted:
            raise
        except KeyboardInterrupt as pressed:
            raise self.on_interrupt(pressed) from None
        except Exception as error:
            if not self._final and is_from_outside(error):
                self.cancel()
            raise

    def _serve(self, timeout: float | None) -> float | None:
        """Serve the sockets while waiting, if that is for this thread; return the rest of the timeout."""
        return timeout

    def serve(self, done: Callable[[], bool], timeout: float | None) -> None:
        """Serve the sockets until ``done()``, at most ``timeout`` seconds, if that is for this thread to do."""

    def on_interrupt(self, pressed: KeyboardInterrupt) -> KeyboardInterrupt:
        """Pass an interrupt of a wait on to the ranks; returns the error that the wait raises."""
        self.cancel()
        return pressed

    def cancel(self) -> bool:
        if self._final:
            return False
        if self._cancel_call is not None:
            self._cancel_call(self.call.id)
        return True

    def _timeout_error(self, timeout_s: float) -> BaseException:
        asked_s = timeout_s if self._timeout_s is None else self._timeout_s
        return CallTimeout(self.call.what, asked_s, self.call.waiting, partial=self.call.results)


SENT: RequestFuture[Any] = RequestFuture(None, partial(OpenCall, 0, 0, "", Region.of({}), fail_fast=False))
"""The complete future of every message that a worker sends without wanting an answer."""
SENT.set_result(None)


class CallFuture(RequestFuture[T], Generic[T]):
    """The future of a controller's call: who waits for it serves the sockets, and interrupts its ranks in stages.

    Waiting raises CallInterrupted if the person interrupts.
    """

    def __init__(self, control: CallControl, open_call: Callable[[Future[T]], OpenCall]) -> None:
        super().__init__(control.cancel, open_call)
        self._control = control

    def __await__(self) -> Generator[object, None, T]:
        """Wait without blocking the running asyncio loop; an interrupt reaches the ranks, as with `get`.

        Other cancellations of the task end the wait, not the work. Raises: as `get`; CancelledError in place of
        CallInterrupted in a task that is not a notebook's cell.
        """
        try:
            return (yield from super().__await__())
        except BaseException as error:
            from meshbook.concurrency.interrupts import in_a_cell, is_interrupt  # who awaits has asyncio

            if not is_interrupt(error):
                raise
            interrupted = self.interrupt()
            if not in_a_cell():
                raise
            raise interrupted from None

    def interrupt(self) -> CallInterrupted:
        """Interrupt the call on its ranks, more insistently each time (`meshbook.calls.interrupt`).

        Returns: who obeyed within the grace time, and where the others are and why; in less than a second.
        """
        while True:
            try:
                return interrupt(self._control, [self.call])
            except KeyboardInterrupt:  # pressed again just before or after presses are noticed
                continue

    def describe_wait(self) -> str:
        """Return the calls that are ahead of this one, ``rank 3 is still in cell 7: ...``; empty when it runs."""
        return describe_wait(self._control, self.call)

    def on_interrupt(self, pressed: KeyboardInterrupt) -> KeyboardInterrupt:
        return self.interrupt()

    def wait(self, timeout: float | None = None, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Wait, on the main thread also until ``wanted()``; whether there is an outcome.

        Raises: KeyboardInterrupt, which does not reach the ranks.
        """
        forks.refuse_inherited(self._generation)
        until = None if timeout is None else time.monotonic() + timeout
        self._control.drive(lambda: self.done() or wanted(), timeout)
        if self.done() or wanted():
            return self.done()
        return super().wait(None if until is None else max(0.0, until - time.monotonic()))

    def serve(self, done: Callable[[], bool], timeout: float | None) -> None:
        self._control.drive(done, timeout)

    def _serve(self, timeout: float | None) -> float | None:
        """Serve the sockets while waiting."""
        if self._generation != forks.generation:
            forks.refuse_inherited(self._generation)
        started = time.monotonic()
        if timeout is None or timeout > WAIT_NOTE_S:
            started += self._drive(WAIT_NOTE_S)
            if not self._final and (note := describe_wait(self._control, self.call, only_stuck=True)):
                print(f"{note}\n  {self.call.what} waits for that; an interrupt drops it", file=sys.stderr)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        if not self._final:
            started += self._drive(left)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))

    def _drive(self, timeout_s: float | None) -> float:
        """Serve the sockets, and the prompts of ranks that stop; returns the seconds at those, which do not count."""
        at_prompts_s = 0.0
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if until is None else max(0.0, until + at_prompts_s - time.monotonic())
            self._control.drive(self._done_or_stopped, left)
            if self._final or not self._control.wants_person(self.call):
                return at_prompts_s
            opened = time.monotonic()
            self._control.attend(self.call)
            at_prompts_s += time.monotonic() - opened

    def _done_or_stopped(self) -> bool:
        return bool(self._final) or self._control.wants_person(self.call)

    def end_on_ranks(self, timeout_s: float) -> None:
        """Interrupt the ranks that still run the call, also where it has an outcome, and wait until none does."""
        ended = threading.Event()
        self.call.when_ended(ended.set)
        self._control.cancel(self.call.id)
        ended.wait(timeout_s)


class CellRun:
    """Handle of a running cell. ``future`` completes when every rank has ended; ranks are reported as they end."""

    def __init__(self, id: int, listener: OutputListener) -> None:
        self.durations_s: dict[int, float] = {}
        """Return the seconds that each rank took, for ranks that have ended."""
        self.waited_s: dict[int, float] = {}
        """Seconds of these that each rank waited in collectives."""
        self.id = id
        """The cell's output id; 0: its prints belong to nobody in particular."""
        self._listener = listener
        self._future: CallFuture[ValueMesh[object]] | None = None

    def attach(self, future: CallFuture[ValueMesh[object]]) -> None:
        """Bind the call that runs the cell."""
        self._future = future

    @property
    def future(self) -> CallFuture[ValueMesh[object]]:
        """The future of the values of the last expressions, or of the error."""
        assert self._future is not None
        return self._future

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the cell was sent to."""
        return tuple(self.future.call.members.ranks())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(sorted(self.future.call.waiting))

    def cancel(self) -> None:
        """Interrupt the cell where it runs, drop it where it waits. Does not wait."""
        self.future.cancel()

    def interrupt(self) -> CallInterrupted:
        """Interrupt, wait a moment, and return who obeyed and where the others are stuck."""
        return self.future.interrupt()

    @property
    def dropped(self) -> frozenset[int]:
        """The ranks that never began it."""
        return frozenset(self.future.call.dropped)

    def describe_wait(self) -> str:
        """Return the calls that the cell waits behind, a line per place; empty when it runs everywhere."""
        return self.future.describe_wait()

    def on_reply(self, rank: int, ok: bool, duration_s: float, failure: Failure | None, waited_s: float) -> None:
        """Note that a rank has ended, and tell the listener. Runs on the controller's I/O thread."""
        self.durations_s[rank] = duration_s
        self.waited_s[rank] = waited_s
        self._listener(RankDone(rank, ok, duration_s, failure))


class BufferedListener:
    """A listener that keeps events until the real one is there."""

    def __init__(self) -> None:
        self._events: deque[OutputEvent] = deque()
        self._listener: OutputListener = self._events.append
        self._lock = threading.Lock()
        """Held while kept events are handed on, so that new ones wait."""

    def __call__(self, event: OutputEvent) -> None:
        with self._lock:
            self._listener(event)

    def listen(self, listener: OutputListener) -> None:
        """Hand on the output so far, and from now on all that comes."""
        with self._lock:
            self._listener = listener
            while self._events:
                listener(self._events.popleft())


class ResumedCall(CellRun):
    """A call that was open when its controller ended, or whose answers that one has not had."""

    def __init__(
        self, control: CallControl, state: wire.CallState, mesh: int, members: Members, events: BufferedListener
    ) -> None:
        super().__init__(state.output, events)
        self.what = state.label or "a call"
        """The name that a person gave the call."""
        self.mesh_id = mesh
        self.had_ended = True
        """Whether no rank was at it any more when its hosts reported; then its answers follow at once."""
        self._events = events
        self.attach(CallFuture(control, partial(
            OpenCall, state.id, mesh, self.what, members,
            fail_fast=False, on_reply=self.on_reply, mailbox=state.mailbox, output=state.output,
        )))  # fmt: skip

    def listen(self, listener: OutputListener) -> None:
        """Call ``listener`` with the output so far that nothing has shown, then with all that comes."""
        self._events.listen(listener)

    def __repr__(self) -> str:
        state = f"ranks {list(self.waiting)} are at it" if self.waiting else "ended"
        return f"ResumedCall({self.what!r}, {state})"
