"""Ranks call actors of the controller's process: on its host through shared memory, from others in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import mail_ranks
import numpy as np
import pytest
from patience import wait_until

from meshbook import ProcMesh, this_proc
from meshbook.actor import Actor, endpoint
from meshbook.errors import CallFailed

pytestmark = pytest.mark.slow


class Registry(Actor):
    def __init__(self) -> None:
        self.notes: list[Any] = []

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def note(self, value: Any) -> None:
        self.notes.append(value)

    @endpoint
    def read(self) -> list[Any]:
        return self.notes

    @endpoint
    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)


def ask(registry: Any, endpoint: str, *args: Any) -> Any:
    return getattr(registry, endpoint).call_one(*args).get(20)


def tell(registry: Any, messages: int, size: int) -> None:
    for number in range(messages):
        registry.note.broadcast((mail_ranks.rank(), number, np.full(size, number % 251, np.uint8)))


@pytest.fixture(params=["mesh4", "mesh2x2"])
def mesh(request: pytest.FixtureRequest) -> ProcMesh:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, ProcMesh)
    return found


@pytest.fixture
def registry(mesh: ProcMesh) -> Iterator[Any]:
    registry: Any = this_proc().spawn("registry", Registry)
    yield registry
    registry.stop().get(20)


@pytest.mark.quick("mesh4")
def test_ranks_call_the_process_of_the_controller(mesh: ProcMesh, registry: Any) -> None:
    assert mesh.execute(ask, registry, "echo", 5).get(20).values() == [5] * 4
    array = np.arange(3_000_000.0)
    for back in mesh.execute(ask, registry, "echo", array).get(60).values():
        assert np.array_equal(back, array)
    del back
    wait_until(lambda: set(mesh.execute(mail_ranks.segments_in_use).get(20).values()) == {0})
    wait_until(lambda: not mesh._controller._dispatcher.payloads._pool.in_use)


def test_messages_of_a_rank_come_in_order_while_this_process_is_busy(mesh: ProcMesh, registry: Any) -> None:
    future = mesh.execute(tell, registry, messages=200, size=50_000)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        sum(range(1000))
    future.get(60)
    wait_until(lambda: len(registry.read.call_one().get(20)) == 800)
    notes = registry.read.call_one().get(20)
    for rank in range(4):
        mine = [(number, body) for sender, number, body in notes if sender == rank]
        assert [number for number, _ in mine] == list(range(200))
        assert all((body == number % 251).all() for number, body in mine)


def test_an_actor_that_was_stopped_here_says_so(mesh: ProcMesh) -> None:
    registry: Any = this_proc().spawn("registry", Registry)
    registry.stop().get(20)
    with pytest.raises(CallFailed, match=r'"registry" were stopped'):
        mesh.execute(ask, registry, "echo", 5).get(20)


def test_an_interrupt_of_a_rank_that_waits_for_this_process_cancels(mesh: ProcMesh, registry: Any) -> None:
    future = mesh.execute(ask, registry, "wait", 60)
    time.sleep(0.3)
    interrupted = future.interrupt()  # type: ignore[attr-defined]
    assert set(interrupted.obeyed) == {0, 1, 2, 3}
    assert registry.echo.call_one(1).get(20) == 1, "it waits no longer"
