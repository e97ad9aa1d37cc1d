"""Hosts by a road that is long, loses packets, and is cut for seconds: calls, collectives and messages arrive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import mail_ranks
import psutil
import pytest
import torch
from far_hosts import FarLauncher
from mail_ranks import open_desks
from patience import wait_until

from benchmarks.faults.slow_cable import SlowNamespace
from meshbook import ProcMesh, shutdown, start_hosts
from meshbook.errors import CallInterrupted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LATENCY_S, LOSS = 0.025, 0.02
SUM = "t = torch.ones(100_000) * (rank + 1); dist.all_reduce(t); t.sum().item()"


@pytest.fixture(scope="module")
def road(clean_end: None) -> Iterator[SlowNamespace]:
    try:
        namespace = SlowNamespace(LATENCY_S, LOSS)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no network namespace, or no TAP device, can be made here")
    with contextlib.closing(namespace):
        yield namespace


@pytest.fixture(scope="module")
def mesh(road: SlowNamespace) -> Iterator[ProcMesh]:
    shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshbook.mesh.host_agents.loopback_address", lambda: road.address)
        hosts = start_hosts({"hosts": 2}, FarLauncher(road))
        with hosts.spawn_procs({"gpus": 1}, name="far", device="cpu", owns_hosts=True) as procs:
            yield procs
        shutdown()


def test_calls_collectives_values_and_messages_arrive(mesh: ProcMesh) -> None:
    began = time.monotonic()
    mesh.slice(hosts=1).run("1").get(60)
    assert time.monotonic() - began > 2 * LATENCY_S, "the road is long"
    assert mesh.run(SUM).get(120).values() == [300_000.0] * 2
    mesh.push({"block": torch.arange(1_000_000)}).get(120)
    assert torch.equal(mesh.pull("block").get(120).values()[1], torch.arange(1_000_000))
    there = open_desks(mesh)
    assert mesh.slice(hosts=0).execute(mail_ranks.ask, there, "echo", 7).get(60).values()[0] == {0: 7, 1: 7}


def test_an_interrupt_arrives(mesh: ProcMesh) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(CallInterrupted):
        mesh.run("import time; time.sleep(120)").get(60)
    assert mesh.run(SUM).get(120).values() == [300_000.0] * 2


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_a_short_cut_costs_nothing(road: SlowNamespace, mesh: ProcMesh, seconds: float) -> None:
    pids = mesh.execute(os.getpid).get(60).values()
    mesh.run("steps = 0").get(60)
    call = mesh.run("for steps in range(1, 41):\n    dist.all_reduce(torch.ones(1000))\nsteps")
    road.pull()
    threading.Timer(seconds, road.plug).start()
    assert call.get(120).values() == [40, 40] and not mesh.lost
    assert mesh.execute(os.getpid).get(60).values() == pids


def test_a_long_cut_is_a_lost_host_which_is_healed_and_ends_when_it_comes_back(
    road: SlowNamespace, mesh: ProcMesh
) -> None:
    mesh.run("kept = rank").get(60)
    hello = mesh._mesh.hosts[1].hello
    assert hello is not None
    former = [agent := psutil.Process(hello.pid), *agent.children(recursive=True)]
    road.pull()
    wait_until(lambda: mesh.lost == (1,), timeout_s=60)
    road.plug()
    said = str(mesh.heal())
    assert "host" in said and "rank 1 started again" in said
    assert mesh.run("globals().get('kept')").get(60).values() == [0, None]
    assert mesh.run(SUM).get(120).values() == [300_000.0] * 2
    assert not psutil.wait_procs(former, timeout=30)[1], "it has learned that others have the places of its ranks"
