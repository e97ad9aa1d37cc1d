"""The state that the process groups of a rank share (`GroupState`), and the users of each (`Users`, `Counts`).

A cell, an actor and a thread of the user's own may use one group. Whether a call has left a group uneven can only be
told from the operations of that call, so those of the main thread are counted apart; and a group that other threads are
at work in is theirs to finish.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
import time
from collections.abc import Callable, Collection, Mapping
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, TypeAlias

from meshbook.concurrency.interrupts import task_of_this_thread
from meshbook.errors import GroupAborted
from meshbook.groups.progress import OperationLog, Wait, Waiting
from meshbook.groups.reach import Roads
from meshbook.source import thread_frames
from meshbook.source.location import users_place

if TYPE_CHECKING:
    from meshbook.groups.work import AbortableWork, CollectiveWork

Handled: TypeAlias = Mapping[int, tuple[int, Collection[int]]]
"""Thread of an actor to its mailbox and the messages that it handles, by serial."""

_pool_code: CodeType = vars(concurrent.futures.thread)["_worker"].__code__


class Counts:
    """Operations that were begun: collectives, and by peer (base rank) sends and receives."""

    __slots__ = ("issued", "received", "sent")

    def __init__(self) -> None:
        self.issued = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}


class Users:
    """The threads, other than the main one, that have used a group since it was formed.

    An actor's thread uses it for the message that it handles; the next message is another use.
    """

    def __init__(self) -> None:
        self._tasks: dict[int, int] = {}
        """Thread to its task then: the message of an actor, or 0."""
        self._untold: dict[int, int] = {}
        """The tasks that used the former incarnation, and may believe that its operations still count; by thread."""

    def note(self) -> None:
        """The calling thread, not the main one, begins an operation.

        Raises: GroupAborted, once, if the group was formed again since this task used it: elsewhere the same task may
        have been freed from an operation of before.
        """
        thread, task = threading.get_ident(), task_of_this_thread()
        if self._untold and self._untold.pop(thread, None) == task:
            raise GroupAborted("the process groups were formed again meanwhile")
        self._tasks[thread] = task

    def told(self) -> None:
        """The calling thread knows that the group was aborted."""
        thread = threading.get_ident()
        self._tasks.pop(thread, None)
        self._untold.pop(thread, None)

    def renew(self, handled: Handled) -> None:
        """The group is formed again."""
        self._untold = {thread: self._tasks[thread] for thread in self.at_work(handled)}
        self._tasks = {}

    def at_work(self, handled: Handled) -> tuple[int, ...]:
        """The threads whose task goes on."""
        if not self._tasks:
            return ()
        alive = {thread.ident for thread in threading.enumerate()}
        frames = thread_frames.frames() if 0 in self._tasks.values() else {}
        return tuple(
            thread
            for thread, task in list(self._tasks.items())
            if thread in alive
            and (task in handled.get(thread, (0, ()))[1] if task else not _awaits_work(frames.get(thread)))
        )

    def mailboxes(self, handled: Handled) -> tuple[int, ...]:
        """Return the mailboxes of the actors among the users, idle ones too."""
        return tuple({handled[thread][0] for thread in list(self._tasks) if thread in handled})


def _awaits_work(frame: FrameType | None) -> bool:
    """Whether a thread belongs to a pool and has nothing to do."""
    return frame is not None and frame.f_code is _pool_code


class Failures:
    """The operations of one incarnation of a group that failed, or were given up. Told from any thread."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        """on_first: called when the group has become of no use."""
        self.why = ""
        """The reason of the first failure; empty while there is none."""
        self._on_first = on_first
        self._first: dict[tuple[str, int | None], int] = {}

    def note(self, operation: str, number: int, peer: int | None, error: BaseException) -> None:
        """An operation failed on this rank: it does nothing more for it."""
        self._say(f"{operation} failed: {error}")
        key = (operation if peer is not None else "", peer)
        self._first[key] = min(number, self._first.get(key, number))

    def note_given_up(self, operation: str) -> None:
        """Note that an operation which may still be under way is waited for no more."""
        self._say(f"{operation} was given up")

    def _say(self, why: str) -> None:
        if not self.why:
            self.why = why
            self._on_first()

    def served(self, peer: int | None, begun: int, operation: str = "") -> int:
        """Return how many of the ``begun`` operations others can count on: those up to the first that failed."""
        first = self._first.get((operation, peer))
        return begun if first is None else min(begun, first - 1)


STEP_S = 0.025
"""The time between two looks of a wait for signals and aborts."""

EXPLAIN_S = 0.25
"""The time that the reason of an abort may take to arrive from the controller after a connection was lost."""

LOST_CONNECTION = "onnection"
"""A part of gloo's text on a lost connection."""

FORMING_S = 30.0
"""The time that operations of actors and threads wait while the main thread forms the groups."""

BEING_FORMED = "the process groups are being formed again"


class GroupState:
    """There is one on a rank, which all that has to do with its groups holds as its ``guard``."""

    def __init__(self) -> None:
        self.epoch = -1
        self.reason = ""
        """The reason why the groups were aborted; empty while they work."""
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
        """Texts on tensors that operations given up may have left half done, for the next answer."""
        self.copied: list[str] = []
        """The same texts on tensors that have a copy."""
        self.restored: list[str] = []
        """The texts of ``copied`` whose tensors are as they were before."""
        self.moved_bytes = 0
        """Payload of all operations so far (`meshbook.groups.group`); never set back."""
        self.waits: dict[int, AbortableWork] = {}
        """The operation that each thread waits in."""
        self.futures: dict[CollectiveWork, float] = {}
        """Operations whose future somebody holds and that have not ended, and since when (monotonic)."""
        self.backward: set[int] = set()
        """Threads in a backward pass (`meshbook.groups.work`)."""
        self.waited_s: dict[int, float] = {}
        """The seconds that each thread has spent waiting, in all."""
        self.log: OperationLog | None = None
        """The log of operations, while the rank is profiled."""
        self.computed_at: dict[int, float] = {}
        """The time since when the backward pass of a thread only waits for futures of collectives; 0 before that."""
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

    def take_news(self) -> tuple[set[object], bool, list[str], list[str], list[str]]:
        """Return ``used``, ``broken``, ``torn``, ``copied`` and ``restored``, and begin new ones."""
        news = self.used, self.broken, self.torn, self.copied, self.restored
        self.used, self.broken, self.torn, self.copied, self.restored = set(), False, [], [], []
        return news

    def ask_of_actors(self, handled: Callable[[], Handled]) -> None:
        self.handled = handled

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
        """Wait a moment for the reason of an abort, if this failure is a lost connection to a peer."""
        if LOST_CONNECTION in failure:
            self.told.wait(EXPLAIN_S)

    def check(self) -> None:
        """Raises: GroupAborted while the groups are aborted."""
        if self.reason:
            raise GroupAborted(self.reason)

    def describe_waits(self) -> tuple[Waiting, ...]:
        """Return the operations that threads of this process wait in; callable from any of them.

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
