"""`ProcMesh.map`: a function over items, each on the next rank that is free.

Every rank has one item at a time, so slow items and slow ranks hold up nobody else. The thread that called waits, hands
out items as calls end, and opens the prompts of ranks that stop at breakpoints.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from meshbook.calls.interrupt import interrupt
from meshbook.concurrency.interrupts import held_back
from meshbook.errors import CallFailed, ItemFailed, UsageError, WorkerLost
from meshbook.errors.advice import advice
from meshbook.formatting import name_ranks

if TYPE_CHECKING:
    from meshbook.calls.call_future import CallFuture
    from meshbook.concurrency.future import Future
    from meshbook.mesh.proc_mesh import ProcMesh
    from meshbook.shape.value_mesh import ValueMesh

T = TypeVar("T")

LOOK_S = 0.1
"""The interval at which the progress is shown, and prompts are looked for."""
_BAR_CHARS = 20
_short = Repr()
_short.maxstring = _short.maxother = 80


class ItemMap(Generic[T]):
    """The items of one map: those that wait, those that run on ranks, and the results."""

    def __init__(
        self,
        procs: ProcMesh,
        function: Callable[[Any], T],
        items: Iterable[object],
        return_exceptions: bool,
        tell: Callable[[str], object],
    ) -> None:
        """tell: shows a line to the person."""
        if not callable(function):
            raise UsageError(f"map calls a function with each item: procs.map(fn, items), not with {function!r}")
        self._procs, self._function, self._items = procs, function, list(items)
        self._return_exceptions, self._tell = return_exceptions, tell
        self._name = getattr(function, "__name__", "map")
        self._waiting = deque(range(len(self._items)))
        self._free = deque(rank for rank in procs.ranks if rank not in procs.lost)
        if self._waiting and not self._free:
            raise UsageError(f"all of {name_ranks(procs.ranks)} have ended, so nothing can be mapped: {advice().heal}")
        self._running: dict[int, tuple[int, CallFuture[ValueMesh[T]]]] = {}
        """The item and the call of each rank that has one."""
        self._moved: set[int] = set()
        """The items whose rank ended, so that another one got them."""
        self._results: dict[int, T | ItemFailed] = {}
        self._ended: deque[int] = deque()
        """The ranks whose calls have ended."""
        self._news = threading.Event()

    def run(self) -> list[T | ItemFailed]:
        """Return the results in the order of the items. Raises: as `ProcMesh.map`."""
        controller, began = self._procs._controller, time.monotonic()
        try:
            while len(self._results) < len(self._items):
                self._hand_out()
                self._news.wait(LOOK_S)
                self._news.clear()
                for _, call in self._running.values():
                    if controller.wants_person(call.call):
                        controller.attend(call.call)
                while self._ended:
                    self._take(self._ended.popleft())
                if time.monotonic() - began >= LOOK_S:
                    controller.front_end.show_progress(self._describe())
        except KeyboardInterrupt:
            interrupted = self._stop()
            interrupted.partial = dict(self._results)
            raise interrupted from None
        except BaseException:
            self._stop()
            raise
        finally:
            controller.front_end.show_progress("")
        return [self._results[index] for index in range(len(self._items))]

    def _hand_out(self) -> None:
        while self._waiting and self._free:
            with held_back():  # an interrupt finds each call among those that run
                rank, index = self._free.popleft(), self._waiting.popleft()
                call: Future[Any] = self._procs.base().select([rank]).execute(self._function, self._items[index])
                self._running[rank] = index, cast("CallFuture[ValueMesh[T]]", call)
            call.add_done_callback(functools.partial(self._on_done, rank))

    def _on_done(self, rank: int, call: Future[object]) -> None:
        self._ended.append(rank)
        self._news.set()

    def _take(self, rank: int) -> None:
        """Take in the outcome of a rank's call. Raises: ItemFailed, unless errors are results."""
        index, call = self._running.pop(rank)
        try:
            self._results[index] = call.get(0).values()[0]
        except WorkerLost as error:
            if index in self._moved or not (self._free or self._running):
                self._fail(index, error)
                return
            self._moved.add(index)
            self._waiting.appendleft(index)
            item = f"{index} ({_short.repr(self._items[index])})"
            self._tell(f"rank {rank} ended: {error.cause}; its item {item} goes to another rank")
            return
        except CallFailed as error:
            self._fail(index, error)
        self._free.append(rank)

    def _fail(self, index: int, error: CallFailed | WorkerLost) -> None:
        failed = ItemFailed(index, _short.repr(self._items[index]), error.failures)
        has_ranks = self._free or self._running or not isinstance(error, WorkerLost)
        if not (self._return_exceptions and has_ranks):
            failed.partial = dict(self._results)
            raise failed from None
        self._results[index] = failed

    def _stop(self) -> Any:
        """Interrupt the items that run; returns the report."""
        calls = [call.call for _, call in self._running.values() if not call.done()]
        return interrupt(self._procs._controller, calls, set(self._running))

    def _describe(self) -> str:
        done, count = len(self._results), len(self._items)
        filled = "#" * (done * _BAR_CHARS // count)
        failed = sum(isinstance(each, ItemFailed) for each in self._results.values())
        odd = f", {failed} failed" if failed else ""
        busy = f" on {name_ranks(self._running)}" if self._running else ""
        return f"{self._name} {done / count:4.0%}|{filled:<{_BAR_CHARS}}| {done}/{count}{odd}{busy}"
