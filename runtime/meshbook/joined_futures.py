"""Futures made of other futures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from meshbook.future import Future

T = TypeVar("T")
U = TypeVar("U")


class MappedFuture(Future[U], Generic[T, U]):
    """``function`` of another future's result, computed by the thread that asks for it (unpickling belongs there)."""

    def __init__(self, source: Future[T], function: Callable[[T], U]) -> None:
        super().__init__(on_cancel=source.cancel)
        self._source, self._function = source, function
        source.add_done_callback(lambda _: self.set_result(None))  # type: ignore[arg-type]  # a wake-up only

    def get(self, timeout: float | None = None) -> U:
        """Wait for the source, then compute. Raises: what the source or the function raises."""
        return self._function(self._source.get(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The source's error, if it has one."""
        return self._source.exception(timeout)


def join_futures(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """A future of all results, in order; the first error becomes its error."""

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
