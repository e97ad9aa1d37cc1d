"""Ranks call mailboxes of ranks on another host, from agent to agent."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import mail_ranks
import numpy as np
import pytest
from mail_ranks import open_desks
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import CallFailed

pytestmark = pytest.mark.slow


@pytest.fixture
def mortal(clean_end: None) -> Iterator[ProcMesh]:
    """Two hosts of one's own, one rank each."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, name="mortal") as mesh:
        yield mesh


def test_ranks_call_ranks_of_another_host(mesh2x2: ProcMesh) -> None:
    there = open_desks(mesh2x2)
    for _ in range(3):
        answers = mesh2x2.execute(mail_ranks.ask, there, "echo", "hello").get(30).values()
        assert answers == [dict.fromkeys(range(4), "hello")] * 4


def test_a_rank_calls_another_mesh_on_other_hosts(mesh2x2: ProcMesh, mesh2: ProcMesh) -> None:
    there = open_desks(mesh2)
    assert mesh2x2.execute(mail_ranks.ask, there, "echo", 3).get(30).values() == [{0: 3, 1: 3}] * 4
    back = open_desks(mesh2x2)
    assert mesh2.execute(mail_ranks.ask, back, "echo", 4).get(30).values() == [dict.fromkeys(range(4), 4)] * 2


@pytest.mark.parametrize("seed", [3])
def test_messages_of_each_sender_come_in_order_to_each_mailbox(mesh2x2: ProcMesh, seed: int) -> None:
    there = open_desks(mesh2x2)
    mesh2x2.execute(mail_ranks.chatter, there, threads=3, messages=40, seed=seed).get(120)
    for notes in mesh2x2.execute(mail_ranks.ask, there.on(seed), "notes").get(30).values():
        for sender, thread in itertools.product(range(4), range(3)):
            mine = [number for rank, of, number in notes[seed] if (rank, of) == (sender, thread)]
            assert mine == list(range(41))


def test_an_exception_on_another_host_is_raised_where_it_is_waited_for(mesh2x2: ProcMesh) -> None:
    there = open_desks(mesh2x2)
    with pytest.raises(CallFailed, match="ValueError: bad shard"):
        mesh2x2.slice(hosts=0, gpus=1).execute(mail_ranks.ask, there.on(3), "fail").get(30)


def test_large_payloads_cross_in_pieces_and_are_freed(mesh2x2: ProcMesh) -> None:
    there = open_desks(mesh2x2)
    array = np.arange(3_000_000.0)
    back = mesh2x2.slice(hosts=0, gpus=0).execute(mail_ranks.ask, there.on(1, 3), "echo", array).get(60).get(0)
    assert np.array_equal(back[1], array)
    assert np.array_equal(back[3], array)
    sizes = mesh2x2.execute(mail_ranks.ask, there, "size", array).get(60).values()
    assert sizes == [dict.fromkeys(range(4), len(array))] * 4
    del back
    wait_until(lambda: set(mesh2x2.execute(mail_ranks.segments_in_use).get(20).values()) == {0})


def test_a_cancel_reaches_a_mailbox_on_another_host(mesh2x2: ProcMesh) -> None:
    there = open_desks(mesh2x2)
    text = mesh2x2.slice(hosts=0, gpus=0).execute(mail_ranks.cancel_after, there.on(2), 0.1).get(30).get(0)
    assert "KeyboardInterrupt" in text


def test_who_waits_for_a_rank_of_another_host_that_dies_is_told_at_once(mortal: ProcMesh) -> None:
    there = open_desks(mortal)
    victim = mortal.status()[1].pid
    dead = mortal.slice(hosts=0).execute(mail_ranks.death_of_a_callee, there.on(1), victim, signal.SIGKILL)
    seconds, text = dead.get(30).values()[0]
    assert "WorkerLost: rank 1 on" in text
    assert "killed by SIGKILL" in text
    assert seconds < 5.0
    wait_until(lambda: mortal.lost)  # the ranks may know it before this process
    mortal.heal()
    there = open_desks(mortal)
    assert mortal.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1).get(20).values() == [{0: 1, 1: 1}]


def test_who_waits_for_a_host_that_is_lost_is_told_and_calls_its_successor(mortal: ProcMesh) -> None:
    there = open_desks(mortal)
    agent = mortal._mesh.hosts[1].hello
    assert agent is not None
    dead = mortal.slice(hosts=0).execute(mail_ranks.death_of_a_callee, there.on(1), agent.pid, signal.SIGKILL)
    seconds, text = dead.get(30).values()[0]
    assert "WorkerLost: rank 1 on" in text
    assert "its host is lost" in text
    assert seconds < 5.0
    wait_until(lambda: mortal.lost)
    mortal.heal()
    there = open_desks(mortal)
    assert mortal.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1).get(20).values() == [{0: 1, 1: 1}]
    assert mortal.slice(hosts=1).execute(mail_ranks.ask, there, "echo", 2).get(20).values() == [{0: 2, 1: 2}]


def test_a_flood_to_another_host_is_held_back(mesh2x2: ProcMesh) -> None:
    there = open_desks(mesh2x2)
    slow = mesh2x2.status()[3].pid
    os.kill(slow, signal.SIGSTOP)
    try:
        flood = mesh2x2.slice(hosts=0, gpus=0).execute(mail_ranks.flood, there.on(3), messages=12_000, size=20_000)
        time.sleep(2.0)
        assert not flood.done()
        for host, gpu in ((0, 1), (1, 0)):
            assert mesh2x2.slice(hosts=host, gpus=gpu).execute(lambda: 1).get(20).values() == [1]
    finally:
        os.kill(slow, signal.SIGCONT)
    flood.get(60)
    notes = mesh2x2.slice(hosts=0, gpus=0).execute(mail_ranks.ask, there.on(3), "notes").get(60).get(0)[3]
    assert [number for _, _, number in notes] == list(range(12_000))
