"""The open calls and queries of a controller, and the listeners to what calls print. I/O thread only."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from meshbook import wire
from meshbook.calls import OpenCall
from meshbook.errors import MeshStoppedError, WorkerLost
from meshbook.output_events import OutputEvent, OutputListener
from meshbook.pickling import loads

KEPT_LISTENERS = 1024
"""Cells whose late output still finds its listener."""


class CallTable:
    """Routes answers and output by id."""

    def __init__(self) -> None:
        self.default_listener: OutputListener = lambda event: None
        """Gets what belongs to no cell: prints of `execute`, of background threads at start."""
        self._calls: dict[int, OpenCall] = {}
        self._queries: dict[int, Callable[[int, Any], None]] = {}
        self._listeners: OrderedDict[int, OutputListener] = OrderedDict()

    def open(self, call: OpenCall, listener: OutputListener | None) -> None:
        """Expect answers to ``call``."""
        self._calls[call.id] = call
        if listener is not None:
            self._listeners[call.id] = listener
            if len(self._listeners) > KEPT_LISTENERS:
                self._listeners.popitem(last=False)

    def find(self, id: int) -> OpenCall | None:
        return self._calls.get(id)

    def ask(self, id: int, on_answer: Callable[[int, Any], None]) -> None:
        """Expect answers to a query: ``on_answer(rank, value)``."""
        self._queries[id] = on_answer

    def end_query(self, id: int) -> None:
        self._queries.pop(id, None)

    def answer(self, message: wire.Replies, frames: Sequence[bytes], buffers: Sequence[Sequence[Any]]) -> None:
        """Hand out combined replies. ``buffers``: the large buffers of each reply."""
        call, query = self._calls.get(message.id), self._queries.get(message.id)
        at = 0
        for reply, large in zip(message.replies, buffers, strict=True):
            mine, at = frames[at : at + reply.frames], at + reply.frames
            if call is not None:
                call.answer(reply, mine, large)
            elif query is not None and reply.status == wire.OK:
                query(reply.rank, loads(mine[0]))
        if call is not None:
            self.settle_if_done(call)

    def answer_query(self, id: int, host: int, value: Any) -> None:
        """Hand out an agent's own answer."""
        if (on_answer := self._queries.get(id)) is not None:
            on_answer(host, value)

    def settle_if_done(self, call: OpenCall) -> None:
        """Complete the call's future as soon as its policy allows; forget the call when all have answered."""
        if not call.waiting or (call.fail_fast and call.failed):
            call.settle()
        if not call.waiting:
            self._calls.pop(call.id, None)
            call.ended.set_result(None)

    def lose(self, mesh: int, error: WorkerLost) -> None:
        """A worker of ``mesh`` ended: the calls that wait for it learn it now."""
        for call in [call for call in self._calls.values() if call.mesh == mesh]:
            call.lose(error)
            self.settle_if_done(call)

    def give_up(self, mesh: int, name: str) -> None:
        """The mesh is being stopped: fail its calls."""
        for call in [call for call in self._calls.values() if call.mesh == mesh]:
            del self._calls[call.id]
            call.give_up(MeshStoppedError(name))

    def tell(self, output: int, event: OutputEvent) -> None:
        """Hand an output event to whom it belongs."""
        try:
            self._listeners.get(output, self.default_listener)(event)
        except Exception:
            traceback.print_exc()  # a listener's fault must not stop the mesh
