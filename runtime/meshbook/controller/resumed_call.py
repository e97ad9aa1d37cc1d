"""A call that a former controller has made, as the next one holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from meshbook.calls.call import CallFuture, OpenCall
from meshbook.calls.output import OutputEvent, OutputListener, RankDone
from meshbook.errors import CallInterrupted, Failure
from meshbook.shape.value_mesh import ValueMesh


class WaitingEvents:
    """A listener that keeps what comes until the real one is there. I/O thread only."""

    def __init__(self) -> None:
        self._events: deque[OutputEvent] = deque()
        self._listener: OutputListener | None = None

    def __call__(self, event: OutputEvent) -> None:
        if self._listener is None:
            self._events.append(event)
        else:
            self._listener(event)

    def listen(self, listener: OutputListener) -> None:
        """Hand on what has come, and from now on all that comes."""
        self._listener = listener
        while self._events:
            listener(self._events.popleft())


class ResumedCall:
    """A call that was open when its controller ended, or whose answers that one has not had."""

    def __init__(self, call: OpenCall, future: CallFuture[ValueMesh[Any]], output: int, events: WaitingEvents) -> None:
        self.id, self.what = call.id, call.what
        """What a person called it."""
        self.output_id = output
        """What its prints belong to; 0: to nobody in particular."""
        self.mesh_id = call.mesh
        self.future = future
        """Completes with the values of all ranks, or with what went wrong."""
        self.durations_s: dict[int, float] = {}
        self.waited_s: dict[int, float] = {}
        self.had_ended = True
        """Whether no rank was at it any more when its hosts reported; then its answers follow at once."""
        self.on_io_thread: Callable[[Callable[[], None]], None] = lambda action: action()
        self._call, self._events = call, events
        call.on_reply = self._on_reply

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it was sent to."""
        return tuple(self._call.members.ranks())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(sorted(self._call.waiting))

    def listen(self, listener: OutputListener) -> None:
        """Have ``listener`` called with what it has printed and shown unheard, then with all that comes."""
        self.on_io_thread(lambda: self._events.listen(listener))

    def cancel(self) -> None:
        """Interrupt it where it runs, drop it where it waits. Does not wait."""
        self.future.cancel()

    def interrupt(self) -> CallInterrupted:
        """Interrupt, wait a moment, and return who obeyed and where the others are stuck."""
        return self.future.interrupt()

    def __repr__(self) -> str:
        state = f"ranks {list(self.waiting)} are at it" if self.waiting else "ended"
        return f"AdoptedCall({self.what!r}, {state})"

    def _on_reply(self, rank: int, ok: bool, duration_s: float, failure: Failure | None, waited_s: float) -> None:
        self.durations_s[rank] = duration_s
        self.waited_s[rank] = waited_s
        if self.output_id:
            self._events(RankDone(rank, ok, duration_s, failure, self.output_id))
