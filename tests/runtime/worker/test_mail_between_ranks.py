"""Ranks call each other's mailboxes through their agents, on one host and on two; the controller sees nothing of it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import mail_ranks
import numpy as np
import psutil
import pytest
from mail_ranks import open_desks
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts, this_host
from meshbook.errors import CallInterrupted


@pytest.fixture(params=["one host", pytest.param("two hosts", marks=pytest.mark.slow)])
def mesh(request: pytest.FixtureRequest) -> ProcMesh:
    """Four ranks, on one host or two on each of two."""
    mesh: ProcMesh = request.getfixturevalue("mesh4" if request.param == "one host" else "mesh2x2")
    return mesh


@pytest.fixture
def mortal(clean_end: None) -> Iterator[ProcMesh]:
    """Two hosts of one's own, one rank each."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, name="mortal") as mesh:
        yield mesh


def test_messages_of_each_sender_come_in_order_to_each_mailbox(mesh: ProcMesh) -> None:
    there = open_desks(mesh)
    mesh.execute(mail_ranks.chatter, there, threads=3, messages=40, seed=1).get(120)
    for rank in (1, 3):
        for notes in mesh.execute(mail_ranks.ask, there.on(rank), "notes").get(30).values():
            for sender, thread in itertools.product(range(4), range(3)):
                mine = [number for came_from, of, number in notes[rank] if (came_from, of) == (sender, thread)]
                assert mine == list(range(41))


def test_who_waits_for_a_rank_that_dies_is_told_at_once(mesh4: ProcMesh) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="mortal") as mesh:
        there = open_desks(mesh)
        victim = mesh.status()[1].pid
        dead = mesh4.slice(gpus=0).execute(mail_ranks.death_of_a_callee, there.on(1), victim, signal.SIGKILL)
        seconds, text = dead.get(30).get(0)
        assert "WorkerLost: rank 1 on" in text
        assert "killed by SIGKILL" in text
        assert seconds < 1.0
        seconds, text = mesh.slice(gpus=0).execute(mail_ranks.ask_for_seconds, there, "echo", 1).get(30).get(0)
        assert "WorkerLost: rank 1 on" in text
        assert "killed by SIGKILL" in text
        assert seconds < 1.0
    seconds, text = mesh4.slice(gpus=0).execute(mail_ranks.ask_for_seconds, there, "echo", 1).get(30).get(0)
    assert "its mesh was stopped" in text


def test_who_calls_a_mesh_while_it_is_being_stopped_is_told_too(mesh4: ProcMesh, tmp_path: Path) -> None:
    with this_host().spawn_procs({"gpus": 1}, name="ending", group=False) as mesh:
        there = open_desks(mesh)
        mesh.run("import time; time.sleep(60)")  # so that its process lives on for a moment after the stop
        asked = mesh4.slice(gpus=0).execute(mail_ranks.call_again, there, tmp_path / "begun")
        wait_until((tmp_path / "begun").exists)
        mesh.stop()
    first, seconds, second = asked.get(40).get(0)
    assert "its mesh was stopped" in first
    assert "its mesh was stopped" in second
    assert seconds < 10.0


def test_an_interrupt_of_a_cell_that_waits_cancels_what_it_waits_for(mesh4: ProcMesh) -> None:
    there = open_desks(mesh4)
    future = mesh4.slice(gpus=0).execute(mail_ranks.ask, there.on(1, 2), "wait_for_cancel")
    time.sleep(0.3)
    interrupted = mesh4.interrupt()
    assert isinstance(interrupted, CallInterrupted)
    assert set(interrupted.obeyed) == {0}
    assert "KeyboardInterrupt" in str(future.exception(20))
    again = mesh4.slice(gpus=0).execute(mail_ranks.ask, there.on(1, 2), "echo", 1).get(20)
    assert again.get(0) == {1: 1, 2: 1}


def test_large_payloads_go_through_shared_memory_or_in_pieces_and_are_freed(mesh: ProcMesh) -> None:
    there, array = open_desks(mesh), np.arange(3_000_000.0)
    for _ in range(3):
        sizes = mesh.execute(mail_ranks.ask, there, "size", array).get(60).values()
        assert sizes == [dict.fromkeys(range(4), len(array))] * 4
    back = mesh.select([0]).execute(mail_ranks.ask, there.on(1, 3), "echo", array).get(60).get(0)
    assert np.array_equal(back[1], array)
    assert np.array_equal(back[3], array)
    del back
    wait_until(lambda: set(mesh.execute(mail_ranks.segments_in_use).get(20).values()) == {0})


@pytest.mark.slow
def test_a_flood_is_held_back_and_stalls_nobody(mesh4: ProcMesh) -> None:
    there = open_desks(mesh4)
    status = mesh4.status()
    agent = psutil.Process(psutil.Process(status[0].pid).ppid())
    before = agent.memory_info().rss
    os.kill(status[1].pid, signal.SIGSTOP)
    try:
        flood = mesh4.slice(gpus=0).execute(mail_ranks.flood, there.on(1), messages=4000, size=20_000)
        time.sleep(1.0)
        started = time.monotonic()
        assert mesh4.slice(gpus=[2, 3]).execute(mail_ranks.ask, there.on(2, 3), "echo", 1).get(20).get(2) == {
            2: 1,
            3: 1,
        }
        assert time.monotonic() - started < 5
        assert not flood.done()
        assert agent.memory_info().rss - before < 60 << 20
    finally:
        os.kill(status[1].pid, signal.SIGCONT)
    flood.get(60)
    notes = mesh4.slice(gpus=0).execute(mail_ranks.ask, there.on(1), "notes").get(60).get(0)[1]
    assert [number for _, _, number in notes] == list(range(4000))


@pytest.mark.slow
def test_a_flood_to_a_rank_that_dies_goes_on(mesh4: ProcMesh, mesh2: ProcMesh) -> None:
    there = open_desks(mesh2)
    victim = mesh2.status()[1].pid
    os.kill(victim, signal.SIGSTOP)
    flood = mesh4.slice(gpus=0).execute(mail_ranks.flood, there.on(1), messages=4000, size=20_000)
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    flood.get(30)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["rank", "host"])
def test_who_waits_for_a_rank_of_another_host_is_told_of_its_end_and_calls_its_successor(
    mortal: ProcMesh, lost: str
) -> None:
    there, agent = open_desks(mortal), mortal._mesh.hosts[1].hello
    assert agent is not None
    victim = mortal.status()[1].pid if lost == "rank" else agent.pid
    dead = mortal.slice(hosts=0).execute(mail_ranks.death_of_a_callee, there.on(1), victim, signal.SIGKILL)
    seconds, text = dead.get(30).values()[0]
    assert "WorkerLost: rank 1 on" in text
    assert ("killed by SIGKILL" if lost == "rank" else "its host is lost") in text
    assert seconds < 5.0
    wait_until(lambda: mortal.lost)  # the ranks may know it before this process
    mortal.heal()
    there = open_desks(mortal)
    assert mortal.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1).get(20).values() == [{0: 1, 1: 1}]
    assert mortal.slice(hosts=1).execute(mail_ranks.ask, there, "echo", 2).get(20).values() == [{0: 2, 1: 2}]


@pytest.mark.slow
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
