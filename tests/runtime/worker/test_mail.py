"""Calls to mailboxes: beside the main thread of a rank, in order, with all that calls have."""

from __future__ import annotations

import itertools
import time
from typing import Any

import mail_ranks
import numpy as np
import pytest
from patience import wait_until

from meshbook import ProcMesh
from meshbook.calls.call import CallRequest
from meshbook.calls.call_future import CallFuture
from meshbook.errors import CallFailed
from meshbook.mesh import states
from meshbook.shape.members import members_of
from meshbook.values.pickling import dumps

_numbers = itertools.count(100)


class Desks:
    """Mailboxes of one number on all ranks of a mesh, and how to reach them."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.mesh = mesh
        self.mailbox = next(_numbers)
        mesh.execute(mail_ranks.open_desk, self.mailbox).get(20)

    def call(self, endpoint: str, *args: Any, mesh: ProcMesh | None = None, mailbox: int = 0) -> CallFuture[Any]:
        mesh = mesh or self.mesh
        body = dumps((args, {}), what=endpoint)
        request = CallRequest(endpoint, members_of(mesh), body, endpoint, mailbox=mailbox or self.mailbox)
        return mesh._controller.call(mesh._mesh, request)


def lent_by(mesh: ProcMesh) -> set[int]:
    """Payloads of the controller in shared memory that somebody still looks at."""
    return set(mesh._controller._dispatcher.payloads._pool.in_use)


@pytest.fixture(scope="module")
def desks(mesh4: ProcMesh) -> Desks:
    return Desks(mesh4)


def test_a_rank_has_no_mail_thread_before_its_first_mail(mesh2: ProcMesh) -> None:
    assert not any("meshbook.mail" in names for names in mesh2.execute(mail_ranks.threads).get(20).values())
    Desks(mesh2).call("echo", 1, mesh=mesh2.slice(gpus=1)).get(20)
    first, second = mesh2.execute(mail_ranks.threads).get(20).values()
    assert "meshbook.mail" not in first
    assert "meshbook.mail" in second


def test_a_mailbox_that_is_not_there_says_so(desks: Desks) -> None:
    with pytest.raises(CallFailed, match="rank 0 has no mailbox 9999: what it belonged to was stopped, or"):
        desks.call("echo", 1, mesh=desks.mesh.slice(gpus=0), mailbox=9999).get(20)
    other = Desks(desks.mesh)
    desks.mesh.execute(mail_ranks.close_desk, other.mailbox, 'actor "counter" was stopped').get(20)
    with pytest.raises(CallFailed, match=rf'rank 1 has no mailbox {other.mailbox}: actor "counter" was stopped\.'):
        other.call("echo", 1, mesh=desks.mesh.slice(gpus=1)).get(20)


def test_a_handler_that_raises_costs_its_message_only(desks: Desks) -> None:
    box = next(_numbers)
    desks.mesh.execute(mail_ranks.open_rude_box, box).get(20)
    with pytest.raises(CallFailed, match="RuntimeError: no room at the desk"):
        desks.call("echo", 1, mailbox=box).get(20)
    assert desks.call("echo", 2).get(20).values() == [2] * 4


def test_large_arguments_and_results_of_mail_are_freed(desks: Desks) -> None:
    array = np.arange(1_000_000.0)
    before = lent_by(desks.mesh)
    for _ in range(3):
        for back in desks.call("echo", array).get(30).values():
            assert np.array_equal(back, array)
        del back
    wait_until(lambda: set(desks.mesh.execute(mail_ranks.segments_in_use).get(20).values()) == {0})
    wait_until(lambda: lent_by(desks.mesh) <= before)


def test_arguments_of_mail_that_nobody_takes_are_freed(desks: Desks) -> None:
    before = lent_by(desks.mesh)
    with pytest.raises(CallFailed, match="no mailbox"):
        desks.call("echo", np.zeros(1_000_000), mailbox=9999).get(20)
    wait_until(lambda: lent_by(desks.mesh) <= before)


def test_an_interrupt_names_who_does_not_end_a_call_to_its_mailbox(desks: Desks) -> None:
    other = Desks(desks.mesh)
    future = other.call("nap", 2.0, mesh=desks.mesh.slice(gpus=[1, 3]))
    time.sleep(0.3)
    interrupted = future.interrupt()
    assert set(interrupted.stuck) == {1, 3}
    assert "it was told to stop and has not ended the call yet" in str(interrupted)
    assert states.interrupted(desks.mesh) == ()
