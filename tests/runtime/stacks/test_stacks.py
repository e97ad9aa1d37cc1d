"""Stacks of ranks that run, wait, sleep, hold the GIL or are stopped: on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from meshbook.agent import stack_dumps
from meshbook.agent.stack_dumps import OutsideStacks
from meshbook.lifecycle import WorkerPhase
from meshbook.mesh.proc_mesh import ProcMesh
from meshbook.stacks.dump import parse_faulthandler, parse_py_spy
from meshbook.system.event_loop import EventLoop
from meshbook.system.processes import process_state
from meshbook.wire import messages as wire

GIL = "import ctypes; hold = ctypes.PyDLL(None).usleep"
CODE = f"""{GIL}
import time
def load():
    time.sleep(60)
def step():
    if rank == 1:
        load()
    dist.all_reduce(torch.ones(1))
if rank == 3:
    hold(6_000_000)
step()"""


def settle(mesh: ProcMesh, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture
def hanging(mesh4: ProcMesh) -> Iterator[ProcMesh]:
    """Ranks 0 and 2 wait in all_reduce, 1 sleeps, 3 holds the GIL for some seconds."""
    future = mesh4.run(CODE)
    settle(mesh4, lambda: [one.state for one in mesh4.status()] == ["busy", "busy", "busy", "silent"])
    time.sleep(0.6)
    yield mesh4
    mesh4.interrupt()
    with pytest.raises(Exception, match="nterrupt"):
        future.get(20)


def test_each_kind_of_rank_is_told_with_its_lines_and_the_odd_ones_are_named(hanging: ProcMesh) -> None:
    stacks = hanging.stacks()
    assert [one.state for one in stacks] == ["waiting", "busy", "waiting", "silent"]
    assert stacks.verdict is not None and stacks.verdict.odd == (1, 3)
    text = str(stacks)
    number = stacks[0].collectives.waiting[0].number
    assert text.startswith(f"ranks 0,2 wait in all_reduce (a cell, line 8), operation {number};\n")
    assert f"  rank 1 has issued {number - 1} and is in time.sleep (a cell, line 4),\n" in text
    assert "  rank 3 does not answer: native code holds the GIL (a cell, line 10)\n" in text
    assert "    a cell, line 7   step      load()\n    a cell, line 4   load      time.sleep(60)\n" in text
    assert (
        "[3] silent: native code holds the GIL; read from outside (signal)\n    a cell, line 10  <module>  hold("
        in text
    )
    assert "[0,2] waiting in all_reduce (a cell, line 8) for " in text
    assert "guarded_work" not in text and "endpoints.py" not in text
    assert "endpoints.py" in stacks.text(all_frames=True)
    stacks = hanging.select([0]).stacks(all_threads=True)
    assert [one.rank for one in stacks] == [0]
    assert stacks.verdict is not None and stacks.verdict.odd == (1, 3)
    assert stacks[0].main is not None and stacks[0].main.users[0].source == "dist.all_reduce(torch.ones(1))"


def test_reading_from_outside_does_not_end_the_native_call(mesh4: ProcMesh) -> None:
    future = mesh4.run(f"{GIL}\nimport time\nbegan = time.monotonic()\nhold(2_500_000)\ntime.monotonic() - began")
    settle(mesh4, lambda: all(one.state == "silent" for one in mesh4.status()))
    assert {one.read_by for one in mesh4.stacks()} == {"signal"}
    assert all(took_s >= 2.5 for took_s in future.get(20).values())


def test_a_stopped_rank_is_read_by_py_spy(mesh4: ProcMesh) -> None:
    if stack_dumps.find_py_spy() is None:
        pytest.skip("py-spy is not installed: pip install 'meshbook[stacks]'")
    future = mesh4.run("import time\nif rank == 2:\n    time.sleep(3)")
    settle(mesh4, lambda: mesh4.status()[2].state == "busy")
    time.sleep(0.3)
    pid = mesh4.status()[2].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        settle(mesh4, lambda: process_state(pid) == "T")  # on a busy machine its threads run on for a moment
        stacks = mesh4.stacks(timeout_s=20)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (stacks[2].state, stacks[2].read_by) == ("stopped", "py-spy"), stacks[2]
    assert "[2] stopped by SIGSTOP; read from outside (py-spy)\n    a cell, line 3  <module>  time.sleep(3)" in str(
        stacks
    )
    future.get(20)


def test_an_asynchronous_operation_that_one_rank_never_issues_names_it(mesh4: ProcMesh) -> None:
    code = (
        "import time\nif rank != 2:\n    work = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "time.sleep(3)\nif rank == 2:\n    dist.all_reduce(torch.ones(1))\nelse:\n    work.wait()"
    )
    future = mesh4.run(code)
    texts: list[str] = []
    named = "ranks 0,1,3 wait in all_reduce (a cell, line 4), operation "

    def is_named() -> bool:  # also where a rank begins late
        texts.append(str(mesh4.stacks()))
        return texts[-1].startswith(named)

    settle(mesh4, is_named)
    future.get(20)
    assert texts[-1].startswith(named), texts
    assert " and is in time.sleep (a cell, line 4)\n" in texts[-1]


def test_many_stacks_fit_one_screen(mesh4: ProcMesh) -> None:
    from meshbook.source.location import ThreadStack, make_frame
    from meshbook.stacks.mesh_stacks import MeshStacks, RankStack

    def at(rank: int) -> RankStack:
        frames = tuple(make_frame(f"f{depth}", "/home/ann/train.py", rank + depth) for depth in range(30))
        return RankStack(rank, "busy", f"at train.py:{rank}", 5.0, (ThreadStack("main", True, frames),))

    lines = MeshStacks([at(rank) for rank in range(64)]).text().splitlines()
    assert len(lines) < 110 and max(map(len, lines)) < 120
    assert lines[-1] == "[24-63] 40 ranks in other places; choose some: mesh.stacks()[24]"


def test_a_dump_of_faulthandler_is_read() -> None:
    text = (
        "Thread 0x00007f1e6f6a3f16 (most recent call first):\n"
        '  File "/x/meshbook/worker.py", line 9 in _control\n\n'
        "Current thread 0x00007f1e6f6a3f17 [python] (most recent call first):\n"
        '  File "<cell 7>", line 3 in <module>\n'
        '  File "/x/meshbook/worker.py", line 136 in serve_calls\n'
    )
    main, control = parse_faulthandler(text)
    assert (main.is_main, main.name, main.frames[0].function, main.frames[0].line) == (True, "python", "<module>", 3)
    assert not control.is_main
    assert parse_faulthandler("nonsense\n") == ()


def test_what_py_spy_says_instead_of_stacks_is_no_stack() -> None:
    with pytest.raises(msgspec.DecodeError):
        parse_py_spy("Error: Permission Denied", 12)
    frame = '{"name": "f", "filename": "a.py", "line": 3}'
    spied = f'[{{"os_thread_id": 12, "thread_name": null, "owns_gil": true, "frames": [{frame}]}}]'
    (thread,) = parse_py_spy(spied, 12)
    assert thread.is_main and thread.frames[0].file == "a.py"
    assert "ptrace_scope" in stack_dumps._explain("Error: Permission Denied: Try running again with elevated")


def test_without_py_spy_a_stopped_process_is_answered_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "find_py_spy", lambda: None)
    answers: list[Mapping[int, wire.RankDump]] = []
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            while process_state(child.pid) != "T":
                time.sleep(0.01)
            phase = WorkerPhase.READY
            worker: Any = SimpleNamespace(rank=3, pid=child.pid, phase=phase, control_thread=0, dump_fd=-1)
            ask = wire.AskStacks(native=False, wait_s=2.0)
            OutsideStacks(EventLoop(), [worker], ask, answers.append).start()
        finally:
            child.kill()
    (dump,) = answers[0].values()
    assert (dump.rank, dump.threads) == (3, ()) and "pip install 'meshbook[stacks]'" in dump.problem


def test_a_py_spy_that_hangs_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(stack_dumps, "find_py_spy", lambda: str(slow))
    answers: list[Mapping[int, wire.RankDump]] = []
    loop = EventLoop()
    worker: Any = SimpleNamespace(rank=0, pid=os.getpid(), phase=WorkerPhase.READY, control_thread=0, dump_fd=-1)
    ask = wire.AskStacks(native=True, wait_s=0.3)
    OutsideStacks(loop, [worker], ask, answers.append).start()
    while not answers:
        loop.run_once()
    assert "py-spy could not read it in time" in answers[0][0].problem
