"""Interrupting and cancelling calls: who obeys, who is stuck, what is kept."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from collector import Collector

from meshbook import ProcMesh, errors

SLEEP = "import time\nmark = 'before'\ntime.sleep(60)\nmark = 'after'"


def _busy(mesh: ProcMesh) -> None:
    deadline = time.monotonic() + 20
    while any(status.state != "busy" or "sleep" not in status.where for status in mesh.status()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_interrupt_stops_sleeping_ranks_and_keeps_their_variables(mesh4: ProcMesh) -> None:
    future = mesh4.run(SLEEP)
    _busy(mesh4)
    started = time.monotonic()
    interrupted = future.interrupt()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 2
    assert interrupted.obeyed == (0, 1, 2, 3)
    assert interrupted.stuck == {}
    assert mesh4.pull("mark").get(30).values() == ["before"] * 4


def test_ctrl_c_while_waiting_reaches_the_ranks(mesh4: ProcMesh) -> None:
    future = mesh4.execute(time.sleep, 60)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(errors.CallInterrupted, match="ranks 0-3 stopped, all variables kept"):
        future.get(30)
    timer.join()
    assert mesh4.run("rank").get(30).values() == [0, 1, 2, 3]


def test_an_interrupt_frees_a_rank_that_waits_in_a_collective(mesh2: ProcMesh) -> None:
    run = mesh2.start_cell(
        "t = torch.ones(1)\nif rank == 0:\n    dist.all_reduce(t)", on_output=Collector(), cell_number=7, line_offset=1
    )
    deadline = time.monotonic() + 20
    while run.waiting != (0,) or mesh2.where()[0] != "in all_reduce (cell 7, line 4)":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    started = time.monotonic()
    run.interrupt()
    with pytest.raises(errors.CallFailed, match="rank 0 raised KeyboardInterrupt"):
        run.future.get(10)
    assert time.monotonic() - started < 5
    assert mesh2.run("rank").get(30).values() == [0, 1]


def test_a_cancelled_call_that_has_not_started_never_runs(mesh4: ProcMesh) -> None:
    mesh4.run("ran = False").get(30)
    busy = mesh4.run("import time; time.sleep(0.5)")
    queued = mesh4.run("ran = True")
    queued.cancel()
    busy.get(30)
    with pytest.raises(errors.CallFailed, match="cancelled before it started"):
        queued.get(30)
    assert mesh4.pull("ran").get(30).values() == [False] * 4


def test_a_late_interrupt_hits_nobody(mesh4: ProcMesh) -> None:
    for _ in range(20):
        future = mesh4.run("rank")
        future.get(30)
        future.cancel()
    assert mesh4.run("sum(range(100000))").get(30).values() == [4999950000] * 4


def test_await_and_subprocesses_are_interrupted_too(mesh4: ProcMesh) -> None:
    for code, place in (("import asyncio\nawait asyncio.sleep(60)", ""), ("!sleep 60", "")):
        future = mesh4.run(code)
        time.sleep(0.5)
        interrupted = future.interrupt()  # type: ignore[attr-defined]
        assert interrupted.obeyed == (0, 1, 2, 3), (code, place)
    assert mesh4.run("rank").get(30).values() == [0, 1, 2, 3]


def test_user_code_may_swallow_the_interrupt_and_go_on(mesh4: ProcMesh) -> None:
    future = mesh4.run("import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    caught = True\ncaught")
    _busy(mesh4)
    future.cancel()
    assert future.get(30).values() == [True] * 4
