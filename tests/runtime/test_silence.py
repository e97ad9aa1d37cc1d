"""Silence is not death where a process is seen to live: a stopped agent is suspect, and taken back with its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import mail_ranks
import pytest
from mail_ranks import open_desks
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.errors import CallInterrupted, MeshError
from meshbook.known_host import MAX_SILENCE_S, SUSPECT_S


@pytest.fixture
def beside(clean_end: None) -> Iterator[ProcMesh]:
    """Two agents on this machine, which see its shared memory, one rank each."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    with hosts.spawn_procs({"gpus": 1}, name="beside", device="cpu", owns_hosts=True) as mesh:
        yield mesh


def agent_of(mesh: ProcMesh, host: int) -> int:
    hello = mesh._mesh.hosts[host].hello
    assert hello is not None
    return hello.pid


@contextlib.contextmanager
def stalled(pid: int) -> Iterator[None]:
    """The process is stopped for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def press_interrupt(after_s: float) -> None:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_agent_that_stalls_is_suspect_and_taken_back_with_its_ranks(beside: ProcMesh) -> None:
    beside.run("state = 41 + rank").get(30)
    pids = beside.execute(os.getpid).get(30).values()
    there = open_desks(beside)
    beside.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 1).get(30)
    with stalled(agent_of(beside, 1)):
        pending = beside.run("dist.all_reduce(t := torch.ones(1)); state + t.item()")
        asked = beside.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 2, timeout=60)
        wait_until(lambda: beside.suspects)
        (status,) = beside.slice(hosts=1).status()
        assert (status.state, status.where.partition(":")[0]) == ("silent", "its host is suspect")
        press_interrupt(0.2)
        with pytest.raises(CallInterrupted, match=r"rank 1 is still in .*: its host is suspect: no sign of life for"):
            beside.slice(hosts=1).run("1").get(30)
        silent_until = time.monotonic() + MAX_SILENCE_S + 2
        while time.monotonic() < silent_until:
            assert not beside.lost
            time.sleep(0.1)
        assert "nothing to heal; its process groups were not proved, since ranks are busy" in str(beside.heal())
    assert pending.get(60).values() == [43.0, 44.0]
    assert asked.get(60).values() == [{0: 2, 1: 2}]
    wait_until(lambda: not beside.suspects)
    assert beside.execute(os.getpid).get(30).values() == pids
    assert beside.run("state").get(30).values() == [41, 42]


def test_an_agent_that_is_killed_while_it_is_suspect_is_lost_at_once(beside: ProcMesh) -> None:
    pid = agent_of(beside, 1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: beside.suspects)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: beside.lost == (1,), timeout_s=5)
    assert not beside.suspects


def test_a_mesh_with_a_suspect_host_of_its_own_can_be_stopped(beside: ProcMesh) -> None:
    with contextlib.suppress(ProcessLookupError), stalled(agent_of(beside, 1)):
        wait_until(lambda: beside.suspects)
        beside.stop(timeout_s=2)
    assert not beside.alive


def test_a_mesh_on_a_suspect_host_that_others_use_says_why_it_has_not_ended(clean_end: None) -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher())
    mesh = hosts.spawn_procs({"gpus": 1}, name="shared", device="cpu", group=False)
    with stalled(agent_of(mesh, 0)):
        wait_until(lambda: mesh.suspects)
        with pytest.raises(MeshError, match=r"is suspect, no sign of life for .*: they end when it answers"):
            mesh.stop(timeout_s=0.5)
    mesh._mesh.stopped.get(30)
    hosts.stop()


def test_a_host_elsewhere_that_falls_silent_is_suspect_first_and_lost_later(clean_end: None) -> None:
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, name="elsewhere", device="cpu", owns_hosts=True) as mesh:
        began = time.monotonic()
        with stalled(agent_of(mesh, 1)):
            wait_until(lambda: mesh.suspects)
            assert time.monotonic() - began > SUSPECT_S - 1.5
            assert not mesh.lost
            wait_until(lambda: mesh.lost == (1,))
