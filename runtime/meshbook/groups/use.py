"""What a rank remembers of one process group's use: what its cells have begun, which threads use it, what failed in it.

A cell, an actor and a thread of the user's own may use one group. Whether a call has left a group uneven can only be
told of what that call has begun, so operations of the main thread are counted apart; and a group that other threads
are at work in is theirs to finish.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FrameType
from typing import TypeAlias

from meshbook.concurrency.thread_interrupts import task_of_this_thread
from meshbook.errors import GroupAborted
from meshbook.source import thread_frames

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
        """Of the former incarnation: who may believe that the operations before still count."""

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
        """Those of the actors among them, idle ones too."""
        return tuple({handled[thread][0] for thread in list(self._tasks) if thread in handled})


def _awaits_work(frame: FrameType | None) -> bool:
    """Whether a thread belongs to a pool and has nothing to do."""
    return frame is not None and frame.f_code is _pool_code


class Failures:
    """The operations of one incarnation of a group that failed, or were given up. Told from any thread."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        """on_first: called when the group has become of no use."""
        self.why = ""
        """Why it has; of the first one."""
        self._on_first = on_first
        self._first: dict[tuple[str, int | None], int] = {}

    def note(self, operation: str, number: int, peer: int | None, error: BaseException) -> None:
        """An operation failed on this rank: it does nothing more for it."""
        self._say(f"{operation} failed: {error}")
        key = (operation if peer is not None else "", peer)
        self._first[key] = min(number, self._first.get(key, number))

    def note_given_up(self, operation: str) -> None:
        """Nobody waits for an operation any more that may still be under way."""
        self._say(f"{operation} was given up")

    def _say(self, why: str) -> None:
        if not self.why:
            self.why = why
            self._on_first()

    def served(self, peer: int | None, begun: int, operation: str = "") -> int:
        """How many of the ``begun`` operations others can count on: those up to the first that failed."""
        first = self._first.get((operation, peer))
        return begun if first is None else min(begun, first - 1)
