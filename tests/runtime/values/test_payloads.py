"""Large values are those at the moment of the call, to every host, lie in memory once, and are freed when dropped."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kept_arrays import SIZE_BYTES, Keeper, seen
from patience import wait_until

from meshbook import LocalLauncher, ProcMesh, start_hosts
from meshbook.actor import Channel
from meshbook.concurrency.future import Future
from meshbook.errors import CallFailed, CallInterrupted, MeshStoppedError, WorkerLost
from meshbook.wire.connection import WINDOW_BYTES

MB = 1 << 20


@pytest.fixture
def three_hosts(clean_end: None) -> Iterator[ProcMesh]:
    """Three hosts without shared memory, one rank each."""
    hosts = start_hosts({"hosts": 3}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 1}, name="three", group=False) as mesh:
        yield mesh


def segments_in_use(mesh: ProcMesh) -> int:
    return len(mesh._controller._dispatcher.payloads._pool.in_use)


@pytest.mark.slow
def test_values_are_those_at_the_moment_of_the_call(mesh2x2: ProcMesh) -> None:
    keepers = mesh2x2.spawn("keepers", Keeper)
    keepers.initialized.get(60)
    array = np.zeros(SIZE_BYTES, np.uint8)
    calls = [
        mesh2x2.push({"x": array}),
        mesh2x2.execute(seen, array),
        mesh2x2.scatter("pieces", [array, array], axis="hosts"),
        keepers.see.call(array),
    ]
    array[:] = 7
    _, executed, _, asked = (call.get(120) for call in calls)
    assert executed.values() == asked.values() == [[0]] * 4
    assert mesh2x2.run("int(x.max()), int(pieces[0].max())").get(30).values() == [(0, 0)] * 4


@pytest.mark.slow
def test_values_that_actors_send_are_those_at_the_moment_of_sending(mesh2x2: ProcMesh) -> None:
    keepers = mesh2x2.spawn("senders", Keeper)
    port, receiver = Channel[object].open()
    assert keepers.slice(hosts=1, gpus=0).see_sent.call_one(port, keepers.slice(hosts=0)).get(120) == [[0]] * 2
    assert seen(receiver.recv().get(60)) == [0]
    made = keepers.slice(hosts=1, gpus=1).make.call_one()
    keepers.slice(hosts=1, gpus=1).spoil.call_one().get(60)
    assert seen(made.get(60)) == [0]


def test_empty_tensors_cross_hosts(mesh2x2: ProcMesh) -> None:
    mesh2x2.push({"none": torch.zeros(0), "x": torch.zeros(3)}).get(30)
    assert mesh2x2.run("none.shape, none").get(30).values()[3][1].numel() == 0


def anonymous_bytes() -> int:
    """Memory of this process that is not shared."""
    (kb,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kb) << 10


def most_anonymous_bytes(until: Callable[[], bool]) -> int:
    most = 0
    while not until():
        most = max(most, anonymous_bytes())
        time.sleep(0.005)
    return most


@pytest.mark.slow
def test_what_waits_for_many_hosts_lies_in_memory_once(three_hosts: ProcMesh) -> None:
    array = np.ones(96 * MB, np.uint8)
    three_hosts.push({"x": array[:MB]}).get(60)
    before = anonymous_bytes()
    pushed = three_hosts.push({"x": array})
    grown = most_anonymous_bytes(pushed.done) - before
    pushed.get(120)
    assert grown < 3 * 4 * WINDOW_BYTES, f"{grown >> 20} MB"
    wait_until(lambda: segments_in_use(three_hosts) == 0)


@pytest.mark.slow
def test_a_stalled_host_holds_up_nobody_else_and_no_copies(three_hosts: ProcMesh) -> None:
    pids = three_hosts.execute(os.getppid).get(30).values()
    os.kill(pids[2], signal.SIGSTOP)
    try:
        before = anonymous_bytes()
        pushed = three_hosts.push({"x": np.ones(96 * MB, np.uint8)})
        assert three_hosts.slice(hosts=slice(0, 2)).run("int(x.min())").get(60).values() == [1, 1]
        assert anonymous_bytes() - before < 3 * 4 * WINDOW_BYTES
        assert segments_in_use(three_hosts) == 1
    finally:
        os.kill(pids[2], signal.SIGCONT)
    pushed.get(60)
    wait_until(lambda: segments_in_use(three_hosts) == 0)


@pytest.mark.slow
def test_a_payload_of_a_lost_host_is_freed(three_hosts: ProcMesh) -> None:
    agent = three_hosts.execute(os.getppid).get(30).values()[2]
    os.kill(agent, signal.SIGSTOP)
    pushed = three_hosts.push({"x": np.ones(96 * MB, np.uint8)})
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        pushed.get(60)
    wait_until(lambda: segments_in_use(three_hosts) == 0)


@pytest.mark.slow
def test_a_payload_on_its_way_to_a_stalled_host_is_taken_back_with_its_call(three_hosts: ProcMesh) -> None:
    agent = three_hosts.execute(os.getppid).get(30).values()[2]
    os.kill(agent, signal.SIGSTOP)
    try:
        pushed = three_hosts.push({"x": np.ones(96 * MB, np.uint8)})
        behind = three_hosts.push({"y": 1})
        wait_until(lambda: pushed.call.waiting == behind.call.waiting == {2})
        for call in (pushed, behind):
            call.cancel()
            with pytest.raises((CallFailed, CallInterrupted), match="cancelled before it started"):
                call.get(20)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: segments_in_use(three_hosts) == 0)
    assert three_hosts.run("'x' in globals(), 'y' in globals()").get(30).values() == [(True, True)] * 2 + [(False,) * 2]


def push_behind_a_failure(mesh: ProcMesh) -> tuple[Future[Any], Future[Any]]:
    """A cell that has failed on one rank and runs on on the other, and a push that queues behind it."""
    failing = mesh.run("import time\nif rank == 0: raise ValueError\ntime.sleep(60)")
    wait_until(lambda: any(call.failed for call in mesh._controller.open_calls(mesh.id)))
    queued = mesh.push({"x": np.zeros(32 * MB, np.uint8)})
    assert segments_in_use(mesh) == 1
    return failing, queued


def press_interrupt() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("end", ["cancel", "interrupt"])
def test_payloads_of_calls_that_are_dropped_while_they_queue_are_freed(mesh2: ProcMesh, end: str) -> None:
    failing, queued = push_behind_a_failure(mesh2)
    if end == "cancel":
        queued.cancel()
    else:
        press_interrupt()
    with pytest.raises((CallFailed, CallInterrupted)):
        queued.get(30)
    wait_until(lambda: segments_in_use(mesh2) == 0)
    failing.cancel()
    with pytest.raises(CallFailed):
        failing.get(30)


@pytest.mark.slow
def test_payloads_of_calls_that_queue_when_a_mesh_is_stopped_are_freed(mesh2: ProcMesh) -> None:
    _, queued = push_behind_a_failure(mesh2)
    mesh2.stop()
    with pytest.raises(MeshStoppedError):
        queued.get(30)
    wait_until(lambda: segments_in_use(mesh2) == 0)
