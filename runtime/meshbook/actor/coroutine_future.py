"""`returns_future`: an ``async def`` whose calls are futures, for scripts and coroutines alike. Monarch's name."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

from meshbook.actor.errors import ArgumentsError
from meshbook.concurrency.background import run_in_background
from meshbook.concurrency.future import Future

P = ParamSpec("P")
T = TypeVar("T")

_tasks: set[asyncio.Task[None]] = set()
"""Event loops hold their tasks weakly."""


def returns_future(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Future[T]]:
    """Have calls of an ``async def`` give a `Future`.

    The body begins when somebody wants its result, and runs once: on the event loop that awaits, or, for ``.get()``, on
    one of its own, aside where this thread runs a loop already. A ``.get()`` that has begun it and is interrupted, or
    late, cancels it. Raises: ArgumentsError for what is no ``async def``.
    """
    if not inspect.iscoroutinefunction(function):
        raise ArgumentsError(f"returns_future wraps an `async def`, and {function!r} is none.")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return CoroutineFuture(function(*args, **kwargs))

    return call


class CoroutineFuture(Future[T]):
    """The result of a coroutine that begins when it is wanted."""

    __slots__ = ("_begin", "_body", "_context")

    def __init__(self, body: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self._body: Coroutine[Any, Any, T] | None = body
        self._context, self._begin = contextvars.copy_context(), threading.Lock()

    def __del__(self) -> None:
        if (body := self._take()) is not None:
            body.close()  # nobody has asked: it never began, and is not complained of

    def get(self, timeout: float | None = None) -> T:
        if (body := self._take()) is not None:
            self._run(body, timeout)
        return super().get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if (body := self._take()) is not None:
            self._run(body, timeout)
        return super().exception(timeout)

    def __await__(self) -> Generator[object, None, T]:
        if (body := self._take()) is not None:
            task = self._context.run(asyncio.get_running_loop().create_task, self._finish_with(body))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
        return (yield from super().__await__())

    def _take(self) -> Coroutine[Any, Any, T] | None:
        """The body, for the first who wants it."""
        with self._begin:
            body, self._body = self._body, None
        return body

    def _run(self, body: Coroutine[Any, Any, T], timeout: float | None) -> None:
        """Run it on an event loop of its own, here where there is none. Raises: KeyboardInterrupt."""
        work: Callable[[], None] = lambda: self._context.run(asyncio.run, self._finish_in(body, timeout))  # noqa: E731
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            try:
                work()
            except BaseException:
                self.set_exception(asyncio.CancelledError())
                raise
        else:
            run_in_background(work)

    async def _finish_in(self, body: Coroutine[Any, Any, T], timeout: float | None) -> None:
        task = asyncio.ensure_future(self._finish_with(body))
        _, late = await asyncio.wait([task], timeout=timeout)
        if late:
            self.set_exception(TimeoutError(f"not done within {timeout} s"))
            task.cancel()
            await asyncio.wait([task])

    async def _finish_with(self, body: Coroutine[Any, Any, T]) -> None:
        try:
            self.set_result(await body)
        except BaseException as error:
            self.set_exception(error)
            if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
                raise
