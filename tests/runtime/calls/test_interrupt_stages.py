"""Interrupts in stages, on code that does not want to stop: what is said, how soon, and what is left afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collector import Collector
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.calls.call_future import CellRun
from meshbook.calls.rank_state import find_silence
from meshbook.mesh.rank_calls import start_cell
from meshbook.system.processes import descendants, is_same_process, start_time

PROMPT_S = 1.0
"""Each stage gives the prompt back within a second; a test machine that is busy gets twice that."""

LOOP = """\
import time
n = 0
while {condition}:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        n += 1
"""
NESTED = """\
import time
def inner():
    while not stop:
        try:
            time.sleep(0.3)
        except KeyboardInterrupt:
            pass
stop = False
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    try:
        inner()
    except KeyboardInterrupt:
        pass
"""
HOLD_GIL = "import ctypes\nctypes.PyDLL(None).usleep({microseconds})"
RESTARTS = """\
import ctypes, time
c = ctypes.CDLL(None)
class Timespec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
lock = ctypes.create_string_buffer(64)
c.pthread_mutex_lock(lock)
c.pthread_mutex_timedlock(lock, ctypes.byref(Timespec(int(time.time()) + {seconds}, 0)))
"""


def start(mesh: ProcMesh, code: str, number: int = 7) -> CellRun:
    """Start a cell and wait until all of its ranks are in it."""
    run = start_cell(mesh, code, on_output=Collector(), cell_number=number)
    wait_until(lambda: all(status.state != "idle" for status in mesh.status()))
    time.sleep(0.1)
    return run


def interrupt(run: CellRun) -> errors.CallInterrupted:
    """Press once; the prompt must be back in time."""
    began = time.monotonic()
    report = run.interrupt()
    assert time.monotonic() - began < 2 * PROMPT_S
    return report


def stop(run: CellRun) -> None:
    """Press once; all ranks must obey."""
    report = interrupt(run)
    assert not report.stuck, report
    run.future.exception(10)


@contextlib.contextmanager
def pressing(*after_s: float) -> Iterator[None]:
    """SIGINT to this process so long after the start of the block; one that comes after its end hits nobody."""
    timers = [threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)) for delay_s in after_s]
    try:
        for timer in timers:
            timer.start()
        yield
    finally:
        for timer in timers:
            while timer.is_alive():
                with contextlib.suppress(KeyboardInterrupt):
                    timer.join()


def works(mesh: ProcMesh) -> bool:
    return mesh.run("rank").get(30).values() == list(mesh.ranks)


# ---- code that catches it --------------------------------------------------------------------------------------


def test_a_loop_that_swallows_interrupts_is_named_at_first_and_left_at_the_second(mesh2: ProcMesh) -> None:
    run = start(mesh2, LOOP.format(condition="True"))
    first = interrupt(run)
    assert first.obeyed == () and list(first.stuck) == [0, 1]
    assert str(first).splitlines() == [
        "interrupted",
        "  ranks 0,1 did not stop: in time.sleep (cell 7, line 5); it caught KeyboardInterrupt and goes on",
        "  insist: interrupt once more, or mesh.interrupt()",
    ]
    second = interrupt(run)
    assert second.obeyed == (0, 1) and not second.stuck and second.stage == 2
    assert str(second) == "interrupted: ranks 0,1 stopped, all variables kept"
    assert all(2 <= n <= 4 for n in mesh2.pull("n").get(30).values())


def test_clean_up_runs_to_its_end_when_one_insists(mesh2: ProcMesh) -> None:
    run = start(
        mesh2,
        "import time\nlog = []\ntry:\n    while True:\n        try:\n            time.sleep(60)\n"
        "        except BaseException:\n            log.append('caught')\n"
        "finally:\n    log.append('one')\n    log.append('two')",
    )
    assert interrupt(run).stuck
    assert interrupt(run).obeyed == (0, 1)
    assert all(log[-2:] == ["one", "two"] for log in mesh2.pull("log").get(30).values())


def test_two_layers_of_swallowing_are_named_with_the_way_out(mesh2: ProcMesh) -> None:
    run = start(mesh2, NESTED.format(seconds=60))
    assert interrupt(run).stuck
    second = interrupt(run)
    assert list(second.stuck) == [0, 1]
    assert str(second).splitlines()[1].startswith("  ranks 0,1 still do not stop: in ")
    assert str(second).splitlines()[-1] == (
        "  replace: mesh.respawn([0, 1])    end the mesh: mesh.stop()    or wait: usable again once back"
    )


def test_a_press_while_the_first_still_waits_insists_at_once(mesh2: ProcMesh) -> None:
    run = start(mesh2, LOOP.format(condition="True"))
    with pressing(0.2, 0.45), pytest.raises(errors.CallInterrupted) as caught:
        run.future.get(30)
    assert caught.value.stage == 2 and caught.value.obeyed == (0, 1)
    assert works(mesh2)


# ---- native code -----------------------------------------------------------------------------------------------


def test_native_code_that_holds_the_gil_is_named_and_obeys_late(mesh2: ProcMesh) -> None:
    run = start(mesh2, "import time\nif rank == 1: time.sleep(60)\n" + HOLD_GIL.format(microseconds=5_000_000))
    first = interrupt(run)
    assert first.obeyed == (1,) and first.stuck == {0: "native code holds the GIL"}
    second = interrupt(run)
    assert "rank 0 still does not stop: native code holds the GIL" in str(second)
    assert "replace: mesh.respawn([0])    end the mesh: mesh.stop()" in str(second)
    assert mesh2.select([1]).run("rank").get(30).values() == [1]  # the others work meanwhile
    failed = run.future.exception(30)
    assert isinstance(failed, errors.CallFailed) and failed.failures[0].ename == "KeyboardInterrupt"
    assert works(mesh2)


@pytest.mark.slow
def test_a_long_regular_expression_is_native_code_too(mesh2: ProcMesh) -> None:
    run = start(mesh2, "import re\nre.match(r'(a+)+$', 'a' * 26 + 'b')")
    report = interrupt(run)
    assert all(text == "native code holds the GIL" for text in report.stuck.values())
    run.future.exception(60)
    assert works(mesh2)


def test_native_code_that_goes_on_after_signals_is_told_from_code_that_catches_them(mesh2: ProcMesh) -> None:
    run = start(mesh2, RESTARTS.format(seconds=5))
    first = interrupt(run)
    assert list(first.stuck) == [0, 1]
    assert all(
        "(cell 7, line 7); native code there does not look at interrupts" in text for text in first.stuck.values()
    )
    assert "still do not stop" in str(interrupt(run))
    assert isinstance(run.future.exception(30), errors.CallFailed)
    assert works(mesh2)


# ---- stopped processes -----------------------------------------------------------------------------------------


# ---- waits of all kinds ----------------------------------------------------------------------------------------

WAITS = {
    "sleep": "import time; time.sleep(60)",
    "lock": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
    "queue": "import queue; queue.Queue().get()",
    "join": "import threading, time; t = threading.Thread(target=time.sleep, args=(3,)); t.start(); t.join()",
    "event": "import threading; threading.Event().wait()",
    "pipe": "import os; os.read(os.pipe()[0], 1)",
    "select": "import select; select.select([], [], [], 60)",
    "await": "import asyncio\nawait asyncio.sleep(60)",
    "pure Python": "while True: pass",
    "torch": "a = torch.randn(200, 200)\nwhile True: a @ a",
    "future": "import concurrent.futures\nconcurrent.futures.Future().result()",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_ends_at_the_first_interrupt(mesh4: ProcMesh, name: str) -> None:
    stop(start(mesh4, WAITS[name]))


COMMANDS = {
    "shell": "!sleep 345",
    "run": "import subprocess\nsubprocess.run(['sleep', '345'])",
    "grandchild": "import subprocess\nsubprocess.run('sleep 345; true', shell=True)",
    "capture": "lines = !sleep 345",
    "bash": "%%bash\nsleep 345",
    "os.system": "import os\nos.system('sleep 345')",
}


def sleeping_commands(mesh: ProcMesh) -> dict[int, int]:
    """Processes that run ``sleep 345`` below the ranks, with their start times."""
    found = {}
    for status in mesh.status():
        for child in descendants(status.pid):
            with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as file:
                if file.read() == b"sleep\x00345\x00":
                    found[child] = start_time(child) or 0
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_end_with_their_cell(mesh4: ProcMesh, name: str) -> None:
    run = start(mesh4, COMMANDS[name])
    wait_until(lambda: len(sleeping_commands(mesh4)) == 4)
    commands = sleeping_commands(mesh4)
    stop(run)
    wait_until(lambda: not any(is_same_process(pid, started) for pid, started in commands.items()))


def test_a_process_of_an_earlier_cell_outlives_an_interrupt(mesh2: ProcMesh) -> None:
    mesh2.run("import subprocess, time\nserver = subprocess.Popen(['sleep', '60'])\ntime.sleep(0.05)").get(30)
    run = start(mesh2, "import time; time.sleep(60)")
    assert interrupt(run).obeyed == (0, 1)
    assert mesh2.run("server.poll()").get(30).values() == [None, None]


def test_input_on_a_rank_is_an_error_that_says_what_to_do(mesh2: ProcMesh) -> None:
    for code, error in (
        ("input('name? ')", "input() is not available on ranks"),
        ("import sys; sys.stdin.read()", None),
    ):
        future = mesh2.run(code)
        if error is None:
            assert future.get(10).values() == ["", ""]
        else:
            with pytest.raises(errors.CallFailed, match=r"input\(\) is not available on ranks here: the program"):
                future.get(10)
    with pytest.raises(errors.CallFailed, match=r"getpass\(\) is not available on ranks here: the program"):
        mesh2.run("import getpass\ngetpass.getpass()").get(10)
    assert mesh2.run("try: input('name? ')\nexcept EOFError: 'default'").get(10).values() == [None, None]


# ---- calls that wait -------------------------------------------------------------------------------------------


def test_a_call_behind_a_stuck_rank_is_dropped_where_it_waits(mesh2: ProcMesh) -> None:
    stuck = start(mesh2, "import time\nif rank == 0: time.sleep(60)\n" + HOLD_GIL.format(microseconds=4_000_000))
    assert interrupt(stuck).stuck == {1: "native code holds the GIL"}
    queued = start_cell(mesh2, "ran = True", on_output=Collector(), cell_number=8)
    assert queued.describe_wait() == "rank 1 is still in cell 7: native code holds the GIL"
    report = interrupt(queued)
    assert report.stuck == {1: "cell 7: native code holds the GIL"} and report.stage == 2
    assert mesh2.run("globals().get('ran')").get(30).values() == [None, None]


def test_a_call_behind_a_long_one_leaves_that_alone(mesh2: ProcMesh) -> None:
    long = start(mesh2, "import time\ntime.sleep(4)")
    queued = start_cell(mesh2, "ran = True", on_output=Collector(), cell_number=8)
    report = interrupt(queued)
    assert str(report).splitlines() == [
        "interrupted: ranks 0,1 had not begun and skip it",
        "  ranks 0,1 are still in cell 7: in time.sleep (cell 7, line 2)",
    ]
    assert isinstance(queued.future.exception(5), errors.CallFailed)
    assert long.waiting == (0, 1) and long.future.exception(30) is None
    assert mesh2.run("'ran' in globals()").get(30).values() == [False, False]


def test_waiting_behind_a_stuck_rank_says_so(mesh2: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    stuck = start(mesh2, "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    time.sleep(4)")
    assert interrupt(stuck).stuck
    assert mesh2.run("rank").get(30).values() == [0, 1]
    place = r"ranks? [01,]+ (is|are) still in cell 7: in time\.sleep \(cell 7, line [35]\)[^\n]*\n"
    told = capsys.readouterr().err  # on a busy machine one of them may not have heard of the interrupt
    assert re.fullmatch(rf"({place})+  the cell waits for that; an interrupt drops it\n", told), told


def test_a_cancel_that_overtakes_its_call_drops_it(mesh4: ProcMesh) -> None:
    for _ in range(50):
        future = mesh4.run("rank")
        future.cancel()
        future.exception(10)
    assert works(mesh4)


@pytest.mark.slow
def test_a_call_that_waits_for_its_payload_is_dropped_at_once(mesh2x2: ProcMesh) -> None:
    mesh2x2.run("big = None").get(30)
    future: Any = mesh2x2.push({"big": torch.zeros(10_000_000)})
    began = time.monotonic()
    report = future.interrupt()
    assert time.monotonic() - began < 2 * PROMPT_S
    busy_machine = {"its host does not answer", "native code holds the GIL"}
    assert busy_machine.issuperset(report.stuck.values()), report
    future.exception(30)
    dropped = future.call.dropped
    assert mesh2x2.run("big is None").get(30).values() == [rank in dropped for rank in range(4)]
    mesh2x2.push({"big": torch.ones(100_000)}).get(30)
    assert mesh2x2.run("int(big.sum())").get(30).values() == [100_000] * 4


@pytest.mark.slow
def test_a_push_on_one_host_is_interrupted_anywhere(mesh4: ProcMesh) -> None:
    big = bytes(300_000_000)
    for delay_s in (0.02, 0.1, 0.3):
        with contextlib.suppress(KeyboardInterrupt), pressing(delay_s):
            while True:
                mesh4.push({"big": big}).get(60)
        assert works(mesh4)
    mesh4.push({"big": None}).get(30)


# ---- nothing runs, or not yet ----------------------------------------------------------------------------------


def test_an_interrupt_of_idle_ranks_hurts_nobody(mesh4: ProcMesh) -> None:
    for _ in range(3):
        report = mesh4.interrupt()
        assert (report.obeyed, report.stuck, report.skipping) == ((), {}, {})
        assert mesh4.run("sum(range(100000))").get(30).values() == [4999950000] * 4


def test_a_mesh_can_be_interrupted_as_a_whole_and_in_part(mesh4: ProcMesh) -> None:
    left, right = mesh4.select([0, 1]), mesh4.select([2, 3])
    runs = [start(mesh4.select([rank]), "import time; time.sleep(60)") for rank in range(3)]
    assert left.interrupt().obeyed == (0, 1)
    assert [run.waiting for run in runs] == [(), (), (2,)]
    assert right.interrupt().obeyed == (2,)
    assert works(mesh4)


def test_presses_in_quick_succession_end_one_call_and_nothing_else(mesh4: ProcMesh) -> None:
    for _ in range(3):
        future = mesh4.execute(time.sleep, 60)
        with pressing(0.3, 0.31, 0.32, 0.33):
            try:
                future.get(30)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ipykernel does between cells
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert works(mesh4)


def test_an_interrupted_spawn_leaves_nothing(mesh4: ProcMesh) -> None:
    before = set(descendants(os.getpid()))
    for delay_s in (0.02, 0.15):
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt), pressing(delay_s):
            this_host().spawn_procs({"gpus": 2}, name="never").stop()
        assert time.monotonic() - began < 10
    wait_until(lambda: set(descendants(os.getpid())) <= before)


def test_why_a_rank_is_silent_is_told_by_the_state_of_its_process() -> None:
    assert str(find_silence("R")) == str(find_silence("S")) == "native code holds the GIL"
    assert str(find_silence("T")) == "stopped by SIGSTOP"
    assert str(find_silence("t")) == "stopped by a debugger"
    assert "state D" in str(find_silence("D"))
    assert str(find_silence(None)) == "its host does not answer"
    assert str(find_silence(None, None, "silent for 7 s: it is busy")) == "its host is silent for 7 s: it is busy"
