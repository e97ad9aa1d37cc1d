"""What the tests of mail run on ranks: mailboxes without actors around them."""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshbook import ProcMesh
from meshbook.actor.router import current_router
from meshbook.calls.call import CallRequest
from meshbook.calls.call_future import RequestFuture
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.shape.members import Members, members_of
from meshbook.values.pickling import dumps
from meshbook.wire import messages as wire
from meshbook.worker.process import WorkerRouter
from meshbook.worker.worker import Worker

_numbers = itertools.count(1000)  # of mailboxes; those that tests choose themselves are lower


def worker() -> Worker:
    router = current_router()
    assert isinstance(router, WorkerRouter)
    return router.worker


def rank() -> int:
    return worker().identity.rank


def ok(value: object = None) -> Outcome:
    return Outcome(wire.OK, value, has_value=True)


class Desk:
    """An actor in the raw: a thread with a queue, which answers one message after the other."""

    def __init__(self, mailbox: int) -> None:
        self.seen: list[Any] = []
        self.cancelled = threading.Event()
        self.mailbox = mailbox
        self._queue: queue.SimpleQueue[tuple[wire.Call, LoadArgs, ReplyTo]] = queue.SimpleQueue()
        worker().mail.boxes.open(mailbox, self.take, self.on_cancel)
        threading.Thread(target=self._run, name=f"desk-{mailbox}", daemon=True).start()

    def take(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        self._queue.put((call, load_args, reply))

    def on_cancel(self, call: wire.Call, insist: bool) -> None:
        self.cancelled.set()

    def _run(self) -> None:
        while True:
            self._serve(*self._queue.get())

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        try:
            args, kwargs = load_args()
            reply(ok(getattr(self, call.endpoint)(*args, **kwargs)))
        except BaseException as error:
            status = wire.INTERRUPTED if isinstance(error, KeyboardInterrupt) else wire.RAISED
            reply(Outcome(status, failure=worker().shell.describe(error)))

    # ---- endpoints ----------------------------------------------------------------------------------------------

    def echo(self, value: Any) -> Any:
        return value

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def take_note(self, sender: int, thread: int, number: int, body: Any, size: int) -> int:
        assert len(body) == size
        assert (body == body[0]).all()
        self.seen.append((sender, thread, number))
        return number

    def notes(self) -> list[Any]:
        return self.seen

    def size(self, value: Any) -> int:
        return len(value)

    def wait_for_cancel(self) -> None:
        if not self.cancelled.wait(20):
            raise TimeoutError
        raise KeyboardInterrupt

    def nap(self, seconds: float, begun: Path | None = None) -> None:
        """begun: a file that is there from then on."""
        if begun is not None:
            begun.touch()
        time.sleep(seconds)


DESKS: dict[int, Desk] = {}


def open_desk(mailbox: int) -> None:
    DESKS[mailbox] = Desk(mailbox)


def open_desks(mesh: ProcMesh) -> There:
    """From the controller: a mailbox on each rank of ``mesh``."""
    mailbox = next(_numbers)
    mesh.execute(open_desk, mailbox).get(20)
    return There(mesh.id, members_of(mesh), mailbox)


def close_desk(mailbox: int, why: str) -> None:
    worker().mail.boxes.close(mailbox, why)


def open_rude_box(mailbox: int) -> None:
    """A mailbox whose handler raises."""

    def handler(call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        raise RuntimeError("no room at the desk")

    worker().mail.boxes.open(mailbox, handler)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def segments_in_use() -> int:
    return len(worker().payloads.pool.in_use)


# ---- ranks that call each other ------------------------------------------------------------------------------------


class There(NamedTuple):
    """Mailboxes, as a rank needs to know them."""

    mesh: int
    members: Members
    mailbox: int

    def on(self, *ranks: int) -> There:
        return self._replace(members=self.members.select(ranks))

    def call(self, endpoint: str, *args: Any, reply: bool = True) -> RequestFuture[Any]:
        body = dumps((args, {}), what=endpoint)
        return worker().mail.call(
            CallRequest(endpoint, self.members, body, endpoint, self.mesh, self.mailbox, reply=reply)
        )

    def post(self, endpoint: str, *args: Any) -> None:
        self.call(endpoint, *args, reply=False)


def ask(there: There, endpoint: str, *args: Any, timeout: float = 20) -> dict[int, Any]:
    """Call from the main thread of a rank, and wait."""
    values = there.call(endpoint, *args).get(timeout)
    return {rank: values.get(rank) for rank in values.ranks}


def ask_for_seconds(there: There, endpoint: str, *args: Any) -> tuple[float, str]:
    """How long a call takes to fail, from now, and what it says."""
    started = time.monotonic()
    try:
        there.call(endpoint, *args).get(20)
    except Exception as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def death_of_a_callee(there: There, victim_pid: int, signal_number: int) -> tuple[float, str]:
    """Kill who is called while we wait; how long after that the wait ends, and what it says."""
    future = there.call("nap", 60)
    time.sleep(0.2)
    started = time.monotonic()
    os.kill(victim_pid, signal_number)
    try:
        future.get(20)
    except Exception as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def call_again(there: There, begun: Path) -> tuple[str, float, str]:
    """Call somebody who naps, and once more when that has failed: the first error, and `ask_for_seconds`."""
    return (str(there.call("nap", 60, begun).exception(20)), *ask_for_seconds(there, "nap", 60))


SIZES = (1, 1, 1, 100, 30_000, 400_000)  # bytes of messages: inline, as a frame, in shared memory or in pieces


def chatter(there: There, threads: int, messages: int, seed: int) -> None:
    """Several threads send numbered messages of all sizes to all members, some answered, some not."""

    def talk(thread: int) -> None:
        choose = random.Random((seed, rank(), thread).__hash__())
        futures = []
        for number in range(messages):
            size = choose.choice(SIZES)
            message = (rank(), thread, number, np.full(size, number % 251, np.uint8), size)
            if choose.random() < 0.5:
                futures.append(there.call("take_note", *message))
            else:
                there.post("take_note", *message)
        for future in futures:
            future.get(60)
        there.call("take_note", rank(), thread, messages, np.zeros(1, np.uint8), 1).get(60)

    talking = [threading.Thread(target=talk, args=(index,)) for index in range(threads)]
    for thread in talking:
        thread.start()
    for thread in talking:
        thread.join()


def flood(there: There, messages: int, size: int) -> float:
    """Send faster than anybody reads; how long it took."""
    started = time.monotonic()
    for number in range(messages):
        there.post("take_note", rank(), 0, number, np.full(size, number % 251, np.uint8), size)
    return time.monotonic() - started


class Talk:
    """A thread that calls on and on."""

    def __init__(self, there: There) -> None:
        self.rounds = 0
        self.errors: list[str] = []
        self._there = there
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.errors:
            try:
                answers = self._there.call("echo", self.rounds).get(20).values()
                assert answers == [self.rounds] * len(answers)
                self.rounds += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.002)


TALKS: list[Talk] = []


def keep_talking(there: There) -> None:
    TALKS.append(Talk(there))


def talked() -> tuple[int, list[str]]:
    return TALKS[0].rounds, [error for talk in TALKS for error in talk.errors]
