"""Ranks call mailboxes of the controller's process: on its host through shared memory, from others in pieces."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import mail_ranks
import numpy as np
import pytest
from patience import wait_until

from meshbook import ProcMesh
from meshbook.calls.mailboxes import LoadArgs, Outcome, ReplyTo
from meshbook.errors import CallFailed
from meshbook.wire import messages as wire

pytestmark = pytest.mark.slow

_numbers = itertools.count(5000)


class LocalDesk:
    """A mailbox of this process whose calls a thread answers."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mailbox = next(_numbers)
        self.notes: list[Any] = []
        self.cancelled = threading.Event()
        self._boxes = mesh._controller.mailboxes
        self._queue: queue.SimpleQueue[tuple[wire.Call, LoadArgs, ReplyTo] | None] = queue.SimpleQueue()
        self._boxes.open(self.mailbox, self._take, lambda call, insist: self.cancelled.set())
        self._thread = threading.Thread(target=self._run, name="local-desk")
        self._thread.start()

    def close(self) -> None:
        self._boxes.close(self.mailbox, "this port was closed")
        self.cancelled.set()  # whoever waits for it goes home, also after a failure
        self._queue.put(None)
        self._thread.join()

    def _take(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        self._queue.put((call, load_args, reply))

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._serve(*message)

    def _serve(self, call: wire.Call, load_args: LoadArgs, reply: ReplyTo) -> None:
        (value,), _ = load_args()
        if call.endpoint == "note":
            self.notes.append(value)
            reply(Outcome(wire.OK))
        elif call.endpoint == "wait_for_cancel":
            reply(Outcome(wire.OK, self.cancelled.wait(20), has_value=True))
        else:
            reply(Outcome(wire.OK, value, has_value=True))


@pytest.fixture(params=["mesh4", "mesh2x2"])
def mesh(request: pytest.FixtureRequest) -> ProcMesh:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, ProcMesh)
    return found


@pytest.fixture
def registry(mesh: ProcMesh) -> Iterator[LocalDesk]:
    registry = LocalDesk(mesh)
    yield registry
    registry.close()


@pytest.mark.quick("mesh4")
def test_ranks_call_the_process_of_the_controller(mesh: ProcMesh, registry: LocalDesk) -> None:
    assert mesh.execute(mail_ranks.ask_controller, registry.mailbox, "echo", 5).get(20).values() == [5] * 4
    array = np.arange(3_000_000.0)
    for back in mesh.execute(mail_ranks.ask_controller, registry.mailbox, "echo", array).get(60).values():
        assert np.array_equal(back, array)
    del back
    wait_until(lambda: set(mesh.execute(mail_ranks.segments_in_use).get(20).values()) == {0})
    wait_until(lambda: not mesh._controller._dispatcher.payloads._pool.in_use)


def test_messages_of_a_rank_come_in_order_while_this_process_is_busy(mesh: ProcMesh, registry: LocalDesk) -> None:
    future = mesh.execute(mail_ranks.tell_controller, registry.mailbox, messages=200, size=50_000)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        sum(range(1000))
    future.get(60)
    wait_until(lambda: len(registry.notes) == 800)
    for rank in range(4):
        mine = [(number, body) for sender, number, body in registry.notes if sender == rank]
        assert [number for number, _ in mine] == list(range(200))
        assert all((body == number % 251).all() for number, body in mine)


def test_a_mailbox_that_was_closed_here_says_so(mesh: ProcMesh) -> None:
    registry = LocalDesk(mesh)
    registry.close()
    with pytest.raises(CallFailed, match=r"mailbox \d+: this port was closed"):
        mesh.execute(mail_ranks.ask_controller, registry.mailbox, "echo", 5).get(20)


def test_an_interrupt_of_a_rank_that_waits_for_this_process_cancels(mesh: ProcMesh, registry: LocalDesk) -> None:
    future = mesh.execute(mail_ranks.ask_controller, registry.mailbox, "wait_for_cancel", 1)
    time.sleep(0.3)
    interrupted = future.interrupt()  # type: ignore[attr-defined]
    assert set(interrupted.obeyed) == {0, 1, 2, 3}
    assert registry.cancelled.wait(20)
