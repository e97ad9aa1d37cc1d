"""Interrupts on the main thread, of coroutines, and on threads other than the main one.

*The main thread.* `SigintScope` puts a handler in the place of the one before it, and gives the place back. With it the
main thread serves sockets (`meshbook.controller.io_turns`), awaits, and deals with one interrupt while further presses
are counted (`meshbook.calls.interrupt`). In `held_back` something short is finished.

*Coroutines.* The runner of the event loop handles SIGINT by cancelling the task of the cell (ipykernel, `asyncio.run`).
A handler in Python does not wake an event loop that sleeps, so the cancellation would come when something else happens:
seconds later, or never. While a future is awaited on the main thread our handler stands before the other one: it notes
the press, lets the other do its work, and wakes the loop. `is_interrupt` then tells an interrupt from other cancels.

*Other threads.* Python can have an exception raised in another thread, at its next line of Python; it cannot wake that
thread from a sleep or a lock. So in threads that have a `ThreadGate`, `time.sleep` and `threading.Condition` (which
events, queues, semaphores and barriers are made of) wait in short steps, and so do our futures. A wait in native code
notices when it returns.

    control thread    gate.interrupt(call)     raises it now, or at the end of a section that must not be torn
    the thread        gate.open(call) ... gate.close()    nothing is raised outside of the two

The order of bytecode matters here: an exception that is due comes at calls of Python functions and at jumps backwards,
never between the entry of a ``with`` on a C lock and its body.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import signal
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from meshbook.concurrency import forks
from meshbook.concurrency.forks import at_fork
from meshbook.concurrency.patches import patch

if TYPE_CHECKING:
    import asyncio


_signals: ModuleType = vars(signal)["_signal"]
"""The functions of `signal` without its enumerations, which would double a call's work."""
_SIGINT = int(signal.SIGINT)

SigintHandler: TypeAlias = Callable[[int, FrameType | None], object]


class SigintScope:
    """A scope in which SIGINT calls ``on_press`` and not the handler before it."""

    def __init__(self, on_press: SigintHandler) -> None:
        self._on_press = on_press
        self.before: SigintHandler | None = None
        """The handler that was there when it was opened last."""

    @property
    def is_in_place(self) -> bool:
        """Whether our handler is there: it was opened, and nobody has set another since."""
        return bool(_signals.getsignal(_SIGINT) == self._on_press)

    def open(self) -> bool:
        """Take the place; returns whether it could be taken.

        Only the main thread runs handlers. One that is no function of Python's could not be put back.
        """
        if threading.get_ident() != forks.main_thread:
            return False
        handler = _signals.getsignal(_SIGINT)
        if not callable(handler):
            return False
        self.before = handler
        _signals.signal(_SIGINT, self._on_press)
        return True

    def close(self) -> None:
        """Give the place back, unless somebody else has taken it since."""
        if self.is_in_place:
            _signals.signal(_SIGINT, self.before)


class held_back(SigintScope):  # used as a function is, like `contextlib.suppress`
    """A block that SIGINT interrupts only at its end, when the things that it makes have an owner.

    Not on ranks: their interrupts have a signal of their own, which its receiver must act on.
    """

    def __init__(self) -> None:
        pressed: list[int] = []
        super().__init__(lambda signum, frame: pressed.append(signum))
        self._pressed, self._is_open = pressed, False

    def __enter__(self) -> None:
        self._is_open = len(forks.INTERRUPTS) == 1 and self.open()

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self.close()
            if self._pressed and self.before is not None:
                self.before(signal.SIGINT, None)


LATELY_S = 2.0
"""The time after an interrupt within which a cancelled task counts as cancelled by it."""


class _Watch:
    """The handler, while anything is awaited."""

    def __init__(self) -> None:
        self.awaited = 0
        self.pressed_at = float("-inf")
        self._scope = SigintScope(self._on_sigint)
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the begin of an await; the first one puts the handler in place."""
        if self._scope.is_in_place:
            self.awaited += 1
        elif self._scope.open():
            self.awaited, self._loop = 1, loop

    def end(self) -> None:
        """Note the end of an await; the last one puts the earlier handler back, unless another was set since."""
        self.awaited -= 1
        if self.awaited <= 0:
            self._scope.close()
            self._loop = None

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        self.pressed_at = time.monotonic()
        loop, before = self._loop, self._scope.before
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None)
        if before is not None:
            before(signum, frame)


_watch = _Watch()


@contextlib.contextmanager
def interruptible_await() -> Iterator[None]:
    """Let an interrupt reach the await in this block at once. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import asyncio  # only here and below: who awaits has it, and controllers start faster without

    _watch.begin(asyncio.get_running_loop())
    try:
        yield
    finally:
        _watch.end()


def is_interrupt(error: BaseException) -> bool:
    """Whether a task was cancelled because the person interrupted a moment ago, while something was awaited."""
    import asyncio

    return isinstance(error, asyncio.CancelledError) and time.monotonic() - _watch.pressed_at < LATELY_S


def in_a_cell() -> bool:
    """Whether the running task is IPython's own for a cell: only there may KeyboardInterrupt be raised.

    IPython catches every error of its cell; out of any other task a KeyboardInterrupt would end the event loop.
    """
    import asyncio

    task = asyncio.current_task()
    code = getattr(task.get_coro(), "cr_code", None) if task is not None else None
    return getattr(code, "co_name", "") == "run_cell_async"


T = TypeVar("T")

STEP_S = 0.05
"""The longest time for which a wait does not notice an interrupt."""

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
GATES: dict[int, ThreadGate] = {}
"""The gates of this process, by their threads."""


def gate_of_this_thread() -> ThreadGate | None:
    """The gate of the calling thread, if it has one."""
    return GATES.get(threading.get_ident())


def task_of_this_thread() -> int:
    """Return the task between `ThreadGate.open` and `close`; 0 in threads without a gate."""
    gate = GATES.get(threading.get_ident())
    return gate.running if gate is not None else 0


class ThreadGate:
    """Owns KeyboardInterrupt on the thread that makes it.

    ``with gate:`` one that arrives inside is raised at the end.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self.running = 0
        """The task that was opened; 0 when none is."""
        self._depth = 0
        self._is_due = False
        self.has_held_back = False
        """Whether an interrupt has arrived inside of ``with gate:``."""
        self.meant = 0
        """The last call that was interrupted."""
        GATES[self._thread] = self
        _make_waits_interruptible()

    def end(self) -> None:
        """Note that the thread ends."""
        GATES.pop(self._thread, None)

    # ---- any other thread ---------------------------------------------------------------------------------------

    def interrupt(self, call: int) -> bool:
        """Raise KeyboardInterrupt in ``call`` if it runs; whether it does."""
        with self._lock:
            if not call or self.running != call:
                return False
            self.meant = call
            self._raise()
        return True

    def _raise(self) -> None:
        """Have it raised now or later; the lock is held."""
        if self._depth:
            self.has_held_back = True
        else:
            self._is_due = True
            _set_async_exc(ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt))

    # ---- the thread ---------------------------------------------------------------------------------------------

    def open(self, call: int) -> None:
        """Note that user code of ``call`` runs from here."""
        with self._lock:
            self.has_held_back = self._is_due = False
            self.running = call

    def close(self) -> bool:
        """Note that no user code runs any more: no interrupt is raised once this has returned.

        Returns whether an interrupt came too late to be raised in it.
        """
        is_late = False
        while True:
            try:
                with self._lock:
                    self.running = 0
                    if self._is_due:
                        _nothing()  # what was not raised yet is raised here
                        self._forget_raised()
                    is_late = is_late or self.has_held_back
                    self._is_due = self.has_held_back = False
                return is_late
            except KeyboardInterrupt:  # it came at the last moment
                is_late = True

    def _forget_raised(self) -> None:
        """Raise the pending interrupt here after all, under another name.

        Python can also be told that nothing is due; but 3.11 goes on looking for it then, at every call and jump, and
        never gets past a call once a debugger or profiler traces it.
        """
        try:
            _set_async_exc(ctypes.c_ulong(self._thread), ctypes.py_object(_Forgotten))
            _nothing()
        except _Forgotten:
            pass

    def __enter__(self) -> None:
        with self._lock:
            if self._is_due:
                _nothing()  # what is due comes here, before we count
                self._is_due = False
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        raises = False
        with self._lock:
            self._depth -= 1
            if not self._depth and self.has_held_back:
                self.has_held_back = False
                raises = self.running != 0
        if raises:
            raise KeyboardInterrupt


@types.coroutine
def interruptible(
    gate: ThreadGate, serial: int, coroutine: Coroutine[object, object, T]
) -> Generator[object, object, T]:
    """Await ``coroutine`` with the gate open for ``serial`` during each of its steps, and only then.

    So an interrupt reaches code that blocks in the midst of an event loop, and never the loop itself.
    """
    step: Callable[[Any], object] = coroutine.send
    given: object = None
    is_late = False
    while True:
        try:
            try:
                gate.open(serial)
                yielded = step(given)
            finally:
                is_late = gate.close()
            if is_late:
                raise KeyboardInterrupt
        except StopIteration as end:
            value: T = end.value
            return value
        except KeyboardInterrupt as error:
            gate.close()  # the interrupt may have come just before it was
            if inspect.getcoroutinestate(coroutine) != inspect.CORO_SUSPENDED:
                coroutine.close()  # it may have come before the first step
                raise
            step, given = coroutine.throw, error  # it came when the step had ended
            continue
        try:
            step, given = coroutine.send, (yield yielded)
        except BaseException as error:
            step, given = coroutine.throw, error


class _Forgotten(BaseException):
    """A stand-in for an interrupt that is not to be raised any more."""


def _nothing() -> None:
    """A call, at which exceptions that are due are raised."""


# ---- waits that notice ---------------------------------------------------------------------------------------------

_sleep = time.sleep


def _sleep_in_steps(seconds: float) -> None:
    if threading.get_ident() not in GATES:
        return _sleep(seconds)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > STEP_S:
        _sleep(STEP_S)
    return _sleep(max(left, 0.0) if seconds >= 0 else seconds)


class _SteppedLock:
    """A lock whose waiting threads wake now and then."""

    __slots__ = ("_at_fork_reinit", "_lock", "locked", "release")

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release, self.locked, self._at_fork_reinit = lock.release, lock.locked, lock._at_fork_reinit

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking:
            return bool(self._lock.acquire(False))
        until = None if timeout < 0 else time.monotonic() + timeout
        while True:
            left = STEP_S if until is None else min(STEP_S, until - time.monotonic())
            if left <= 0:
                return bool(self._lock.acquire(False))
            if self._lock.acquire(True, left):
                return True

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_allocate_lock = threading.Lock


WaitingLock: TypeAlias = "threading.Lock | _SteppedLock"


def waiting_lock() -> WaitingLock:
    """A lock to wait with: one that notices interrupts, in threads that have a gate."""
    lock = _allocate_lock()
    return _SteppedLock(lock) if threading.get_ident() in GATES else lock


def _forget_threads() -> None:
    """Forget the gates in a forked child: interrupts are signals there, and a lost thread may hold a lock."""
    for gate in GATES.values():
        gate._lock = threading.Lock()
    GATES.clear()


at_fork(in_child=_forget_threads)


def _make_waits_interruptible() -> None:
    """Make sleeps and conditions interruptible from now on, in threads that have a gate."""
    if time.sleep is _sleep:
        patch(time, "sleep", _sleep_in_steps)
        if hasattr(threading, "_allocate_lock"):  # what Condition.wait makes its waiter with, on every Python so far
            patch(threading, "_allocate_lock", waiting_lock)
