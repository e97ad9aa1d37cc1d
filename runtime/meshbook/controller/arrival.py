"""A mesh whose processes are not there yet, though people have it: what they ask of it waits here.

    spawn_procs ──> MeshState, at once          a thread aside: hosts, workers, process groups, bootstrap
    calls ────────> held, in their order ──────> sent when all of that is done; they fail with what kept it

Under the turn, except where it says otherwise.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from meshbook.concurrency.future import Future
from meshbook.lifecycle import CallEvent

if TYPE_CHECKING:
    from meshbook.controller.outgoing_call import OutgoingCall


class MeshArrival:
    """How far one mesh has come. Made by whoever starts it."""

    def __init__(self) -> None:
        self.done: Future[bool] = Future()
        """True when the processes are there; else it raises what kept them. For any thread."""
        self.thread: threading.Thread | None = None
        """Who brings it up, whose own calls are sent at once."""
        self.is_over = False
        self.is_asked = False
        """Whether anybody is told by a call, or by waiting, what becomes of it."""
        self._held: list[OutgoingCall] = []

    @property
    def is_own(self) -> bool:
        """Whether this thread is at it, and must not wait for it."""
        return self.thread is threading.current_thread()

    def hold(self, call: OutgoingCall) -> None:
        """Send it later."""
        self._held.append(call)

    def cancel(self, id: int) -> bool:
        """Somebody asked for the end of a call; whether it was held here, and has ended now."""
        found = next((held.call for held in self._held if held.call.id == id), None)
        if found is None:
            return False
        self._held = [held for held in self._held if held.call is not found]
        found.cancel()
        found.drop()
        found.settle()
        found.close(CallEvent.SETTLED)
        return True

    def end(self, error: Exception | None = None) -> None:
        """All are there, or will not come. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        held, self._held = self._held, []
        for each in held:
            if error is None:
                each.send()
            else:
                each.fail(error)
        if error is None:
            self.done.set_result(True)
        else:
            self.done.set_exception(error)
