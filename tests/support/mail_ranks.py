"""What the tests of mail run on ranks: mailboxes without actors around them."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

from meshbook import wire
from meshbook.endpoints import Answer
from meshbook.mailboxes import LoadArgs, Reply
from meshbook.this_worker import this_worker
from meshbook.worker import Worker


def worker() -> Worker:
    found = this_worker()
    assert found is not None
    return found


def rank() -> int:
    return worker().identity.rank


def ok(value: object = None) -> Answer:
    return Answer(wire.OK, value, has_value=True)


class Desk:
    """An actor in the raw: a thread with a queue, which answers one message after the other."""

    def __init__(self, mailbox: int) -> None:
        self.seen: list[Any] = []
        self.cancelled = threading.Event()
        self.mailbox = mailbox
        self._queue: queue.SimpleQueue[tuple[wire.Call, LoadArgs, Reply]] = queue.SimpleQueue()
        worker().mail.boxes.open(mailbox, self.take, self.on_cancel)
        threading.Thread(target=self._run, name=f"desk-{mailbox}", daemon=True).start()

    def take(self, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        self._queue.put((call, load_args, reply))

    def on_cancel(self, call: wire.Call, insist: bool) -> None:
        self.cancelled.set()

    def _run(self) -> None:
        while True:
            self._serve(*self._queue.get())

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        try:
            args, kwargs = load_args()
            reply(ok(getattr(self, call.endpoint)(*args, **kwargs)))
        except BaseException as error:
            status = wire.INTERRUPTED if isinstance(error, KeyboardInterrupt) else wire.RAISED
            reply(Answer(status, failure=worker().shell.describe(error)))

    # ---- endpoints ----------------------------------------------------------------------------------------------

    def echo(self, value: Any) -> Any:
        return value

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def notes(self) -> list[Any]:
        return self.seen

    def size(self, value: Any) -> int:
        return len(value)

    def fail(self) -> None:
        raise ValueError("bad shard")

    def die(self) -> None:
        os._exit(7)

    def wait_for_cancel(self) -> None:
        if not self.cancelled.wait(20):
            raise TimeoutError
        raise KeyboardInterrupt

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


DESKS: dict[int, Desk] = {}


def open_desk(mailbox: int) -> None:
    DESKS[mailbox] = Desk(mailbox)


def close_desk(mailbox: int, why: str) -> None:
    worker().mail.boxes.close(mailbox, why)


def open_rude_box(mailbox: int) -> None:
    """A mailbox whose handler raises."""

    def handler(call: wire.Call, load_args: LoadArgs, reply: Reply) -> None:
        raise RuntimeError("no room at the desk")

    worker().mail.boxes.open(mailbox, handler)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def segments_in_use() -> int:
    return len(worker()._payloads.pool.in_use)
