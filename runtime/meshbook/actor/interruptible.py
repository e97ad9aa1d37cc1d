"""Coroutines of which each step can be interrupted, also code that blocks in the midst of an event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from meshbook.concurrency.thread_interrupts import ThreadGate

T = TypeVar("T")


class InterruptibleCoroutine(Generic[T]):
    """An awaitable that runs ``coroutine``; the gate is open for ``serial`` during each of its steps."""

    def __init__(self, gate: ThreadGate, serial: int, coroutine: Coroutine[Any, Any, T]) -> None:
        self._gate, self._serial, self._coroutine = gate, serial, coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        while True:
            try:
                yielded = self._step(step)
            except StopIteration as end:
                answer: T = end.value
                return answer
            except KeyboardInterrupt as error:
                if inspect.getcoroutinestate(self._coroutine) != inspect.CORO_SUSPENDED:
                    raise
                step = functools.partial(self._coroutine.throw, error)  # it came when the step had ended
                continue
            try:
                sent = yield yielded
                step = functools.partial(self._coroutine.send, sent)
            except BaseException as error:
                step = functools.partial(self._coroutine.throw, error)

    def _step(self, step: Callable[[], Any]) -> Any:
        try:
            self._gate.open(self._serial)
            return step()
        finally:
            self._gate.close()
