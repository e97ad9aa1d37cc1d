"""What all process groups of a rank share: whether they may be used, what waits in them, what is news of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

from meshbook.errors import GroupAborted
from meshbook.groups.progress import OperationLog, Wait, Waiting
from meshbook.groups.roads import Roads
from meshbook.groups.use import Handled
from meshbook.source import thread_frames
from meshbook.source.location import users_place

if TYPE_CHECKING:
    from meshbook.groups.work import AbortableWork, CollectiveWork

STEP_S = 0.025
"""How long a wait may last before it looks for signals and aborts."""

EXPLAIN_S = 0.25
"""After a lost connection: how long the reason may take to arrive from the controller."""

LOST_CONNECTION = "onnection"
"""Part of what gloo says of one."""

FORMING_S = 30.0
"""How long operations of actors and threads wait while the main thread forms the groups."""

BEING_FORMED = "the process groups are being formed again"


class GroupState:
    """There is one on a rank, which all that has to do with its groups holds as its ``guard``."""

    def __init__(self) -> None:
        self.epoch = -1
        self.reason = ""
        """Why the groups were aborted; empty while they work."""
        self.reason_epoch = -1
        """Groups of up to this epoch are aborted."""
        self.last_failure: tuple[int, int, dict[str, int]] = (-1, 0, {})
        """The last call that has failed on the main thread: its epoch, its id, and how far each group was."""
        self.used: set[object] = set()
        """Groups with operations that no answer to the controller has told of."""
        self.main = get_ident()
        self.forming = 0
        """The thread that forms the groups, until they are proved: operations of others wait for that."""
        self.broken = False
        """A group has become of no use, and no answer to the controller has told of it."""
        self.handled: Callable[[], Handled] = dict
        """Asked which messages actors handle."""
        self.torn: list[str] = []
        """What operations that were given up may have left half done, for the next answer; see `torn`."""
        self.copied: list[str] = []
        """The same of what there is a copy of."""
        self.restored: list[str] = []
        """What of that is as it was before."""
        self.moved_bytes = 0
        """Payload of all operations so far (`meshbook.groups.group`); never set back."""
        self.waits: dict[int, AbortableWork] = {}
        """By thread."""
        self.futures: dict[CollectiveWork, float] = {}
        """Operations whose future somebody holds and that have not ended, and since when (monotonic)."""
        self.backward: set[int] = set()
        """Threads in a backward pass (`meshbook.groups.autograd`)."""
        self.waited_s: dict[int, float] = {}
        """By thread: the seconds that it has spent waiting, in all."""
        self.log: OperationLog | None = None
        """While the rank is profiled."""
        self.on_future: Callable[[], object] = lambda: None
        """Called when somebody has taken the future of an operation, on that thread."""
        self.told = threading.Event()
        """Set while ``reason`` is."""
        self.roads = Roads()
        self._last_reason = ""
        self._held_since: float | None = None
        self._held_s = 0.0

    def add_wait(self, thread: int, since: float, what: str) -> None:
        """A wait that began at ``since`` (monotonic) is over; on the thread that waited."""
        now = time.monotonic()
        self.waited_s[thread] = self.waited_s.get(thread, 0.0) + now - since
        if self.log is not None:
            self.log.add_wait(Wait(thread, what, since, now))

    def abort(self, epoch: int, reason: str) -> None:
        self._last_reason = self.reason or reason
        self.reason_epoch = max(self.reason_epoch, epoch)
        self.reason = self._last_reason
        self.told.set()

    def renew(self, epoch: int) -> None:
        """Groups are about to be formed under ``epoch``. Raises: GroupAborted if that was aborted before it began."""
        self.check_begun(epoch)
        self.epoch, self.reason = epoch, ""
        self.told.clear()

    def check_begun(self, epoch: int) -> None:
        """Raises: GroupAborted if forming under ``epoch`` was aborted, also while it began, by another thread."""
        if epoch <= self.reason_epoch:
            self.reason = self.reason or self._last_reason
            self.told.set()
            raise GroupAborted(self.reason)

    def note_broken(self) -> None:
        """A group has become of no use, or is no more."""
        self.broken = True

    @property
    def is_forming(self) -> bool:
        """Whether the calling thread forms the groups."""
        return self.forming == get_ident()

    def await_formed(self) -> None:
        """Wait while another thread forms the groups. Raises: GroupAborted when that takes too long."""
        until = time.monotonic() + FORMING_S
        while self.forming and not self.is_forming:
            if time.monotonic() > until:
                raise GroupAborted(BEING_FORMED)
            time.sleep(STEP_S)
        self.check()

    def hold(self, held: bool) -> None:
        """Have `clock` stand still, or go on: nobody can do their part while a person looks at a stopped rank."""
        now = time.monotonic()
        if self._held_since is not None:
            self._held_s += now - self._held_since
        self._held_since = now if held else None

    def clock(self) -> float:
        """Seconds for the deadlines of waits; monotonic, and still while they are held."""
        now = time.monotonic() if self._held_since is None else self._held_since
        return now - self._held_s

    def await_reason(self, failure: str) -> None:
        """Where an operation has lost the connection to a peer: wait a moment for the reason of an abort."""
        if LOST_CONNECTION in failure:
            self.told.wait(EXPLAIN_S)

    def check(self) -> None:
        """Raises: GroupAborted while the groups are aborted."""
        if self.reason:
            raise GroupAborted(self.reason)

    def describe_waits(self) -> tuple[Waiting, ...]:
        """What the threads of this process wait in; from any of them.

        A backward pass that has begun operations and not seen their end counts as waiting for them: it will.
        """
        now, frames = time.monotonic(), thread_frames.frames()
        waits = [(thread, work, work.since) for thread, work in list(self.waits.items())]
        main = self.main
        for thread in list(self.backward)[:1]:
            waits += [(thread, work, since) for work, since in list(self.futures.items())]
        return tuple(
            Waiting(
                work.inner.name, work.operation, work.number, work.peer, users_place(frames.get(thread)), now - since,
                0 if thread == main else thread,
            )
            for thread, work, since in waits
        )  # fmt: skip
