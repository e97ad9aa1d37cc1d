"""A cell that runs on the ranks of a mesh, while it runs and after."""

from __future__ import annotations

from meshbook.actor.router import Values
from meshbook.calls.call import CallFuture
from meshbook.calls.output import OutputListener, RankDone
from meshbook.errors import CallInterrupted, Failure


class CellRun:
    """Handle of a running cell. ``future`` completes when every rank has ended; ranks are reported as they end."""

    def __init__(self, id: int, listener: OutputListener) -> None:
        self.durations_s: dict[int, float] = {}
        """Seconds that each rank took, for those that have ended."""
        self.waited_s: dict[int, float] = {}
        """What of that each spent waiting in collectives."""
        self.id = id
        """The id under which its output comes."""
        self._listener = listener
        self._future: CallFuture[Values] | None = None

    def attach(self, future: CallFuture[Values]) -> None:
        """Bind the call that runs the cell."""
        self._future = future

    @property
    def future(self) -> CallFuture[Values]:
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
