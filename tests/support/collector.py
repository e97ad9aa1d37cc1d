"""A listener that keeps what a cell says."""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshbook.calls.output import DisplayData, OutputDropped, OutputEvent, RankDone, StreamText


class Collector:
    """Use as ``on_output``; `wait_for` waits for a condition over what has come."""

    def __init__(self) -> None:
        self.events: list[OutputEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: OutputEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def text(self, rank: int, stream: str = "stdout", output: int | None = None) -> str:
        return "".join(
            e.text
            for e in self.events
            if isinstance(e, StreamText)
            and (e.rank, e.stream) == (rank, stream)
            and (output is None or e.output == output)
        )

    @property
    def done(self) -> list[RankDone]:
        return [e for e in self.events if isinstance(e, RankDone)]

    @property
    def displays(self) -> list[DisplayData]:
        return [e for e in self.events if isinstance(e, DisplayData)]

    @property
    def cuts(self) -> list[OutputDropped]:
        return [e for e in self.events if isinstance(e, OutputDropped)]

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"not within {timeout_s} s; got {self.events[-5:]}"
