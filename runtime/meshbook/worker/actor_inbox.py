"""The messages that wait for one actor, in the order in which they have come."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.wire import messages as wire


class InboxMessage(msgspec.Struct, eq=False):
    """A call on its way to an actor. serial: never used twice in a process."""

    serial: int
    call: wire.Call
    load: LoadArgs
    reply: ReplyTo


_Item: TypeAlias = "InboxMessage | None"


class Inbox:
    """The inbox of one actor: the reader of the mail fills it, the actor's thread empties it, in Python or in an event
    loop. A thread that waits in Python reads the mail itself, if it may."""

    def __init__(
        self,
        read_while: Callable[[Callable[[], bool]], object] = lambda waits: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """read_while, wake: see `meshbook.worker.mail_turn.MailTurn`."""
        self._read_while, self._wake = read_while, wake
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._loop_queue: asyncio.Queue[_Item] | None = None
        self._aside: Callable[[InboxMessage], bool] = lambda message: False
        self._serial = 0
        self._waiting: dict[int, InboxMessage] = {}  # messages that the actor has not begun, by serial

    def put(self, call: wire.Call, load: LoadArgs, reply: ReplyTo) -> None:
        """Append a message that has come."""
        with self._lock:
            self._serial += 1
            message = InboxMessage(self._serial, call, load, reply)
            self._waiting[message.serial] = message
            self._pass_on(message)

    def end(self) -> None:
        """Have the actor end after the messages that have come so far."""
        with self._lock:
            self._pass_on(None)

    def _pass_on(self, item: _Item) -> None:
        if self._loop is None:
            self._queue.put(item)
            self._wake()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the actor has ended
                is_here = threading.get_ident() == self._loop_thread  # it reads the mail
                (self._loop.call_soon if is_here else self._loop.call_soon_threadsafe)(self._sort, item)

    def _sort(self, item: _Item) -> None:
        """Put a message in its place, unless it is handled aside. Runs in the loop."""
        assert self._loop_queue is not None
        if item is None or not self._aside(item):
            self._loop_queue.put_nowait(item)

    def drop(self, call: wire.Call) -> bool:
        """Drop ``call``, which its sender does not want any more; return whether it waited here."""
        return self.refuse(lambda waiting: waiting is call, lambda waiting: Outcome(wire.DROPPED))

    def refuse(self, is_meant: Callable[[wire.Call], bool], answer: Callable[[wire.Call], Outcome]) -> bool:
        """Answer messages that wait, and will not be handled; return whether there were any."""
        with self._lock:
            refused = [message for message in self._waiting.values() if is_meant(message.call)]
            for message in refused:
                del self._waiting[message.serial]
        for message in refused:
            message.reply(answer(message.call))
        return bool(refused)

    def waiting(self) -> list[str]:
        """Return the endpoints of the messages that wait."""
        with self._lock:
            return [message.call.endpoint for message in self._waiting.values()]

    # ---- the actor's thread -------------------------------------------------------------------------------------

    async def get(self) -> _Item:
        """Wait for the next message; None: the actor is to end. Without a loop it blocks the thread."""
        while True:
            if self._loop_queue is not None:
                message = await self._loop_queue.get()
            else:
                if self._queue.empty():
                    self._read_while(self._queue.empty)
                message = self._queue.get()
            if message is None or message.serial in self._waiting:
                return message

    def enter_loop(self, loop: asyncio.AbstractEventLoop, aside: Callable[[InboxMessage], bool]) -> None:
        """Have `get` awaited in ``loop``. aside: asked there about each message; True: it overtakes the others."""
        with self._lock:
            self._loop, self._loop_queue, self._aside = loop, asyncio.Queue(), aside
            self._loop_thread = threading.get_ident()
            while not self._queue.empty():
                loop.call_soon(self._sort, self._queue.get())

    def begin(self, message: InboxMessage) -> bool:
        """Begin a message; return whether it still waited."""
        with self._lock:
            return self._waiting.pop(message.serial, None) is not None
