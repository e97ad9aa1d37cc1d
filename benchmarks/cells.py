"""A cell on every rank, with its events recorded and timed."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from benchmarks.subject import TIMEOUT_S
from meshbook import ProcMesh
from meshbook.calls.output import OutputDropped, OutputEvent, RankDone, StreamText
from meshbook.mesh.rank_calls import start_cell


class Seen(NamedTuple):
    """An event and the monotonic time at which our callback got it."""

    at_s: float
    event: OutputEvent


class WatchedCell:
    """Starts ``code`` on every rank of ``procs`` and keeps what is reported."""

    def __init__(self, procs: ProcMesh, code: str) -> None:
        self._condition = threading.Condition()
        self._seen: list[Seen] = []
        self.started_s = time.monotonic()
        self.run = start_cell(procs, code, cell_number=1, on_output=self._record)

    def _record(self, event: OutputEvent) -> None:
        with self._condition:
            self._seen.append(Seen(time.monotonic(), event))
            self._condition.notify_all()

    def wait(self) -> float:
        """Wait until the cell has ended on every rank, in whatever way; return the monotonic time of it."""
        try:
            self.run.future.get(TIMEOUT_S)
        except Exception as error:
            if isinstance(error, TimeoutError):
                raise
        return time.monotonic()

    def wait_for_output(self, ranks: int) -> None:
        """Wait until something that each of ``ranks`` ranks printed has reached us, or the news that it was cut.

        Raises: TimeoutError after `subject.TIMEOUT_S`.
        """
        deadline = time.monotonic() + TIMEOUT_S
        with self._condition:
            while len(heard := {rank for seen in self._seen if (rank := getattr(seen.event, "rank", -1)) >= 0}) < ranks:
                if not self._condition.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"only ranks {sorted(heard)} were heard within {TIMEOUT_S:.0f} s")

    def first_failure(self) -> Seen:
        """Wait for the first rank that ended with an error.

        Raises: TimeoutError after `subject.TIMEOUT_S`.
        """

        def failures() -> list[Seen]:
            return [seen for seen in self._seen if isinstance(seen.event, RankDone) and not seen.event.ok]

        with self._condition:
            if not self._condition.wait_for(lambda: bool(failures()), TIMEOUT_S):
                raise TimeoutError(f"no rank failed within {TIMEOUT_S:.0f} s")
            return failures()[0]

    def messages(self) -> int:
        """The number of events with text, or about cut text, that reached us."""
        return sum(isinstance(seen.event, StreamText | OutputDropped) for seen in self._seen)
