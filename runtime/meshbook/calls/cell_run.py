"""A cell that runs on the ranks of a mesh, while it runs and after; and a call that a former controller has made."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from meshbook.calls.call import OpenCall
from meshbook.calls.call_future import CallControl, CallFuture
from meshbook.calls.output import OutputEvent, OutputListener, RankDone
from meshbook.shape.value_mesh import ValueMesh

if TYPE_CHECKING:
    from meshbook.errors import CallInterrupted, Failure
    from meshbook.shape.members import Members
    from meshbook.wire import messages as wire


class CellRun:
    """Handle of a running cell. ``future`` completes when every rank has ended; ranks are reported as they end."""

    def __init__(self, id: int, listener: OutputListener) -> None:
        self.durations_s: dict[int, float] = {}
        """Seconds that each rank took, for those that have ended."""
        self.waited_s: dict[int, float] = {}
        """What of that each spent waiting in collectives."""
        self.id = id
        """The cell's output id; 0: its prints belong to nobody in particular."""
        self._listener = listener
        self._future: CallFuture[ValueMesh[object]] | None = None

    def attach(self, future: CallFuture[ValueMesh[object]]) -> None:
        """Bind the call that runs the cell."""
        self._future = future

    @property
    def future(self) -> CallFuture[ValueMesh[object]]:
        """Completes with the values of the last expressions, or with what went wrong."""
        assert self._future is not None
        return self._future

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the cell was sent to."""
        return tuple(self.future.call.members.ranks())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(sorted(self.future.call.waiting))

    def cancel(self) -> None:
        """Interrupt the cell where it runs, drop it where it waits. Does not wait."""
        self.future.cancel()

    def interrupt(self) -> CallInterrupted:
        """Interrupt, wait a moment, and return who obeyed and where the others are stuck."""
        return self.future.interrupt()

    @property
    def dropped(self) -> frozenset[int]:
        """The ranks that never began it."""
        return frozenset(self.future.call.dropped)

    def describe_wait(self) -> str:
        """Whom the cell waits behind, a line per place; empty when it runs everywhere."""
        return self.future.describe_wait()

    def on_reply(self, rank: int, ok: bool, duration_s: float, failure: Failure | None, waited_s: float) -> None:
        """What the controller tells as each rank ends; on its I/O thread."""
        self.durations_s[rank] = duration_s
        self.waited_s[rank] = waited_s
        self._listener(RankDone(rank, ok, duration_s, failure))


class BufferedListener:
    """A listener that keeps what comes until the real one is there."""

    def __init__(self) -> None:
        self._events: deque[OutputEvent] = deque()
        self._listener: OutputListener = self._events.append
        self._lock = threading.Lock()
        """While what was kept is handed on, what comes waits."""

    def __call__(self, event: OutputEvent) -> None:
        with self._lock:
            self._listener(event)

    def listen(self, listener: OutputListener) -> None:
        """Hand on what has come, and from now on all that comes."""
        with self._lock:
            self._listener = listener
            while self._events:
                listener(self._events.popleft())


class ResumedCall(CellRun):
    """A call that was open when its controller ended, or whose answers that one has not had."""

    def __init__(
        self, control: CallControl, state: wire.CallState, mesh: int, members: Members, events: BufferedListener
    ) -> None:
        super().__init__(state.output, events)
        self.what = state.label or "a call"
        """What a person called it."""
        self.mesh_id = mesh
        self.had_ended = True
        """Whether no rank was at it any more when its hosts reported; then its answers follow at once."""
        self._events = events
        self.attach(CallFuture(control, partial(
            OpenCall, state.id, mesh, self.what, members,
            fail_fast=False, on_reply=self.on_reply, mailbox=state.mailbox, output=state.output,
        )))  # fmt: skip

    def listen(self, listener: OutputListener) -> None:
        """Have ``listener`` called with what it has printed and shown unheard, then with all that comes."""
        self._events.listen(listener)

    def __repr__(self) -> str:
        state = f"ranks {list(self.waiting)} are at it" if self.waiting else "ended"
        return f"ResumedCall({self.what!r}, {state})"
