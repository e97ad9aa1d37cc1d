"""The answer of a call that is still under way, for scripts, notebooks and coroutines alike.

A future is completed once, by any thread. Waiting for it blocks on a lock that exists only while somebody waits: no
event loop is needed, and one that runs in this thread is no hindrance. ``await`` works in any running asyncio loop.

There is no lock around the state, so that signal handlers and finalisers may complete futures too. Three steps
that the interpreter never splits stand in for it: the outcome is the value that `dict.setdefault` stored first; waiters
and callbacks are appended before they look for an outcome, and the outcome is stored before they are popped;
``popleft`` gives each of them to one thread only. Their queues are made when there is a first of them: thousands of
futures may be open at a time, of which hardly one has any, and the garbage collector looks at each queue.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from meshbook.concurrency import forks
from meshbook.concurrency.background import peeking, refuse_in_peek, run_in_background, serving
from meshbook.concurrency.interrupts import WaitingLock, interruptible_await, waiting_lock
from meshbook.errors import UsageError

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

T = TypeVar("T")
U = TypeVar("U")

_log = logging.getLogger(__name__)


_Outcome: TypeAlias = tuple[Any, "BaseException | None", "TracebackType | None"]
"""The value or the error; and the traceback of that when it was set, from which each raise starts."""

_WAITERS, _CALLBACKS = "waiters", "callbacks"
_NONE: deque[Any] = deque()

_WAITS_FOR_ITSELF = (
    "this waits where answers come in: in a callback of a future, in a finalizer (__del__), or in the handler of a "
    "signal that came during a wait. It would wait for itself for ever: have a thread wait, or raise in the handler, "
    "which ends the wait."
)


class Future(Generic[T]):
    """A result that is there or will be.

    on_cancel: called by `cancel` while there is no outcome; it brings about the end of the work.
    on_timeout: makes the error that a wait raises after ``timeout_s``; it may say who is silent.
    """

    __slots__ = ("__weakref__", "_final", "_generation", "_listeners", "_on_cancel", "_on_timeout")

    def __init__(
        self,
        *,
        on_cancel: Callable[[], object] | None = None,
        on_timeout: Callable[[float], BaseException] | None = None,
    ) -> None:
        self._final: dict[int, _Outcome] = {}
        self._listeners: dict[str, deque[Any]] = {}
        """The locks of threads that wait, and callbacks."""
        self._on_cancel, self._on_timeout = on_cancel, on_timeout
        self._generation = forks.generation

    @classmethod
    def completed(cls, value: T) -> Future[T]:
        """Return a future that has its result."""
        future: Future[T] = Future()
        future.set_result(value)
        return future

    # ---- for whoever has the answer ------------------------------------------------------------------------

    def set_result(self, value: T) -> bool:
        """Complete with ``value``; False, and nothing happens, if there is an outcome already."""
        return self._finish((value, None, None))

    def set_exception(self, error: BaseException) -> bool:
        """Complete with ``error``; False, and nothing happens, if there is an outcome already."""
        return self._finish((None, error, error.__traceback__))

    # ---- for whoever wants it ------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether there is an outcome."""
        return bool(self._final)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result, at most ``timeout`` seconds.

        Raises: the error with which the future was completed; at the timeout the error of ``on_timeout``, else
        TimeoutError (the work goes on); KeyboardInterrupt at once, on the main thread; UsageError where there would be
        none: in a process that was forked before, and in a callback, finalizer or handler of a signal that runs on the
        thread that brings it.
        """
        value, error, traceback = self._final.get(0) or self._wait(timeout)
        if error is None:
            return value  # type: ignore[no-any-return]
        try:
            raise error.with_traceback(traceback)
        finally:
            del self, error, traceback  # else the traceback of the error would keep the future, and it the error

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, as `get` does."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `get` does; return the error, or None if there is a result."""
        return (self._final.get(0) or self._wait(timeout))[1]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as `get` does; whether there is an outcome."""
        forks.refuse_inherited(self._generation)
        if timeout != 0 and not self._final:
            if threading.get_ident() in serving:
                raise UsageError(_WAITS_FOR_ITSELF)
            if peeking:
                refuse_in_peek("a wait for a future")
        lock = waiting_lock()
        lock.acquire()
        waiters: deque[WaitingLock] = self._listeners.setdefault(_WAITERS, deque())
        waiters.append(lock)
        if not self._final:
            try:
                lock.acquire(timeout=-1 if timeout is None else min(max(timeout, 0), threading.TIMEOUT_MAX))
            finally:
                _discard(waiters, lock)
        return bool(self._final)

    def __await__(self) -> Generator[object, None, T]:
        """Wait without blocking the running asyncio loop. Cancelling the task ends the wait, not the work."""
        if not self._final:
            forks.refuse_inherited(self._generation)
            import asyncio  # only here: who awaits has it, workers and agents start faster without

            loop = asyncio.get_running_loop()
            waiter, thread = loop.create_future(), threading.get_ident()

            def wake(_: Future[T]) -> None:
                try:
                    (loop.call_soon if self._is_served_by(thread) else loop.call_soon_threadsafe)(_wake, waiter)
                except RuntimeError:  # the loop was closed: nobody waits any more
                    pass

            self.add_done_callback(wake)
            try:
                with interruptible_await():
                    yield from waiter
            finally:
                _discard(self._listeners[_CALLBACKS], wake)
        return self.get()

    def _is_served_by(self, thread: int) -> bool:
        """Whether the event loop of ``thread`` completes it now itself, before it sleeps."""
        return False

    def as_asyncio(self) -> asyncio.Future[T]:
        """Return a future of the running asyncio loop with the same outcome, for `asyncio.gather` and the like."""
        import asyncio

        async def wait() -> T:
            return await self

        return asyncio.ensure_future(wait())

    def as_concurrent(self) -> concurrent.futures.Future[T]:
        """Return a future with the same outcome for `concurrent.futures.wait` and the like. It cannot be cancelled."""
        from concurrent import futures

        made: futures.Future[T] = futures.Future()
        made.set_running_or_notify_cancel()

        def complete() -> None:
            try:
                made.set_result(self.get(0))
            except BaseException as error:
                made.set_exception(error)

        self.add_done_callback(lambda _: run_in_background(complete))  # what unpickles is not for the completing thread
        return made

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` once there is an outcome: on the completing thread, or now if there is one.

        Its errors are logged.
        """
        self._listeners.setdefault(_CALLBACKS, deque()).append(callback)
        if self._final:
            self._run_callbacks()

    def then(self, function: Callable[[T], U]) -> Future[U]:
        """Return a future of ``function(result)``, called on the completing thread; errors pass through.

        Cancelling it cancels this one.
        """
        following: Future[U] = Future(on_cancel=self.cancel, on_timeout=self._timeout_error)

        def follow(done: Future[T]) -> None:
            try:
                following.set_result(function(done.get(0)))
            except BaseException as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following

    def cancel(self) -> bool:
        """Ask for the end of the work; False if there is an outcome already.

        The future completes when the work has ended; without ``on_cancel`` at once, with CancelledError.
        """
        on_cancel = self._on_cancel
        if self._final:
            return False
        if on_cancel is None:
            from concurrent.futures import CancelledError

            return self.set_exception(CancelledError())
        on_cancel()
        return True

    def __repr__(self) -> str:
        outcome = self._final.get(0)
        if outcome is None:
            return "<Future: waiting; .get() gives the result>"
        error = outcome[1]
        return f"<Future: {'done' if error is None else f'failed with {type(error).__name__}'}>"

    # ---- within --------------------------------------------------------------------------------------------

    def _wait(self, timeout: float | None) -> _Outcome:
        if self.wait(timeout):
            return self._final[0]
        assert timeout is not None
        raise self._timeout_error(timeout)

    def _timeout_error(self, timeout_s: float) -> BaseException:
        on_timeout = self._on_timeout
        return on_timeout(timeout_s) if on_timeout else TimeoutError(f"no result within {timeout_s:g} s")

    def _finish(self, outcome: _Outcome) -> bool:
        if self._final.setdefault(0, outcome) is not outcome:
            return False
        if self._listeners:
            waiters: deque[WaitingLock] = self._listeners.get(_WAITERS, _NONE)
            while waiters:
                try:
                    waiters.popleft().release()
                except IndexError:  # the last one has just given up
                    break
            self._run_callbacks()
        self._on_cancel = self._on_timeout = None  # they may hold much
        return True

    def _run_callbacks(self) -> None:
        callbacks: deque[Callable[[Future[T]], object]] = self._listeners.get(_CALLBACKS, _NONE)
        while True:
            try:
                callback = callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                _log.exception("a callback of a future failed")


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _discard(queue: deque[U], item: U) -> None:
    try:
        queue.remove(item)
    except (ValueError, IndexError):  # it was popped already, or something else was meanwhile
        pass


class MappedFuture(Future[U], Generic[T, U]):
    """``function`` of another future's result, computed by the thread that asks for it (unpickling belongs there).

    It has no outcome of its own: all questions are for the source.
    """

    def __init__(self, source: Future[T], function: Callable[[T], U]) -> None:
        self._source, self._function = source, function

    def get(self, timeout: float | None = None) -> U:
        """Wait for the source, then compute. Raises: the errors of the source or the function."""
        return self._function(self._source.get(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The source's error, if it has one."""
        return self._source.exception(timeout)

    def done(self) -> bool:
        return self._source.done()

    def wait(self, timeout: float | None = None) -> bool:
        return self._source.wait(timeout)

    def _timeout_error(self, timeout_s: float) -> BaseException:
        return self._source._timeout_error(timeout_s)

    def cancel(self) -> bool:
        return self._source.cancel()

    def add_done_callback(self, callback: Callable[[Future[U]], object]) -> None:
        self._source.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[object, None, U]:
        return self._function((yield from self._source.__await__()))

    def __repr__(self) -> str:
        return repr(self._source)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` on another thread, now; return a future of its result or error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    run_in_background(run)
    return future


def join_futures(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """Return a future of all results, in order; the first error becomes its error."""

    def cancel_all() -> None:
        for future in futures:
            future.cancel()

    joined: Future[list[T]] = Future(on_cancel=cancel_all)
    left = set(range(len(futures)))

    def on_done(index: int, future: Future[T]) -> None:
        left.discard(index)
        if (error := future.exception(0)) is not None:
            joined.set_exception(error)
        elif not left and not joined.done():
            joined.set_result([each.get(0) for each in futures])

    for index, future in enumerate(futures):
        future.add_done_callback(functools.partial(on_done, index))
    if not futures:
        joined.set_result([])
    return joined
