"""A call that a former controller has made, as the next one holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from meshbook.calls.call import CallControl, CallFuture, OpenCall
from meshbook.calls.output import OutputEvent, OutputListener, RankDone
from meshbook.errors import CallInterrupted, Failure
from meshbook.shape.members import Members
from meshbook.shape.value_mesh import ValueMesh
from meshbook.wire import messages as wire


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

    def __init__(
        self,
        control: CallControl,
        ask: Callable[[Callable[[], None]], None],
        state: wire.CallState,
        mesh: int,
        members: Members,
        events: WaitingEvents,
    ) -> None:
        """ask: has something done under the turn."""
        self.id, self.what = state.id, state.label or "a call"
        """What a person called it."""
        self.output_id = state.output
        """What its prints belong to; 0: to nobody in particular."""
        self.mesh_id = mesh
        self.future: CallFuture[ValueMesh[Any]] = CallFuture(control, partial(
            OpenCall, self.id, mesh, self.what, members,
            fail_fast=False, on_reply=self._on_reply, mailbox=state.mailbox, output=state.output,
        ))  # fmt: skip
        """Completes with the values of all ranks, or with what went wrong."""
        self.durations_s: dict[int, float] = {}
        self.waited_s: dict[int, float] = {}
        self.had_ended = True
        """Whether no rank was at it any more when its hosts reported; then its answers follow at once."""
        self._ask, self._events = ask, events

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it was sent to."""
        return tuple(self.future.call.members.ranks())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that have not ended."""
        return tuple(sorted(self.future.call.waiting))

    def listen(self, listener: OutputListener) -> None:
        """Have ``listener`` called with what it has printed and shown unheard, then with all that comes."""
        self._ask(lambda: self._events.listen(listener))

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
            self._events(RankDone(rank, ok, duration_s, failure))
