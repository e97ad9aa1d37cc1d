"""Interrupting and cancelling calls: who obeys, who is stuck, what is kept."""

from __future__ import annotations

import time

import pytest
from collector import Collector
from patience import wait_until

from meshbook import ProcMesh, errors
from meshbook.mesh import states
from meshbook.mesh.rank_calls import start_cell

SLEEP = "import time\nmark = 'before'\ntime.sleep(60)\nmark = 'after'"


def _busy(mesh: ProcMesh) -> None:
    wait_until(lambda: all(status.state == "busy" and "sleep" in status.where for status in mesh.status()))


def test_an_interrupt_frees_a_rank_that_waits_in_a_collective(mesh2: ProcMesh) -> None:
    run = start_cell(
        mesh2,
        "t = torch.ones(1)\nif rank == 0:\n    dist.all_reduce(t)",
        on_output=Collector(),
        cell_number=7,
        line_offset=1,
    )
    wait_until(lambda: run.waiting == (0,) and states.where(mesh2)[0] == "in all_reduce (cell 7, line 4)")
    assert [one.in_collective for one in mesh2.status()] == [True, False]
    started = time.monotonic()
    run.interrupt()
    with pytest.raises(errors.CallFailed, match="rank 0 raised KeyboardInterrupt"):
        run.future.get(10)
    assert time.monotonic() - started < 5
    assert mesh2.run("rank").get(30).values() == [0, 1]


def test_a_late_interrupt_hits_nobody(mesh4: ProcMesh) -> None:
    for _ in range(20):
        future = mesh4.run("rank")
        future.get(30)
        future.cancel()
    assert mesh4.run("sum(range(100000))").get(30).values() == [4999950000] * 4


def test_user_code_may_swallow_the_interrupt_and_go_on(mesh4: ProcMesh) -> None:
    future = mesh4.run("import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    caught = True\ncaught")
    _busy(mesh4)
    future.cancel()
    assert future.get(30).values() == [True] * 4


# ---- handlers of user code ------------------------------------------------------------------------------------------


def _interrupted(mesh: ProcMesh, code: str) -> str:
    """Interrupt the cell once it sleeps; what its future raises."""
    future = mesh.run(code)
    _busy(mesh)
    future.interrupt()  # type: ignore[attr-defined]
    with pytest.raises(errors.CallFailed) as raised:
        future.get(30)
    return str(raised.value)


@pytest.mark.parametrize(
    "handler", ["lambda *_: seen.append(1)", "signal.SIG_DFL", "signal.SIG_IGN", "signal.default_int_handler"]
)
def test_a_handler_that_a_cell_has_set_is_not_the_next_ones(mesh2: ProcMesh, handler: str) -> None:
    mesh2.run(f"import signal\nseen, state = [], 'kept'\nsignal.signal(signal.SIGINT, {handler})").get(30)
    assert "KeyboardInterrupt" in _interrupted(mesh2, SLEEP)
    assert mesh2.run("seen, state").get(30).values() == [([], "kept")] * 2


def test_a_handler_hears_each_interrupt_of_its_own_cell_once(mesh2: ProcMesh) -> None:
    code = """
import os, signal, time
seen = []
before = signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame is not None)))
is_told = signal.getsignal(signal.SIGINT)(0, None) is None and seen.pop() == (0, False)
until = time.monotonic() + 60
while not seen and time.monotonic() < until: time.sleep(0.02)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGINT)
again = signal.signal(signal.SIGINT, before)
is_told, seen, signal.getsignal(signal.SIGINT) == before
"""
    future = mesh2.run(code)
    _busy(mesh2)
    future.cancel()
    assert future.get(60).values() == [(True, [(2, True)] * 2, True)] * 2


def test_an_event_loop_hears_the_interrupts_of_its_cell(mesh2: ProcMesh) -> None:
    code = """
import asyncio, signal
pressed = asyncio.Event()
asyncio.get_running_loop().add_signal_handler(signal.SIGINT, pressed.set)
await asyncio.wait_for(pressed.wait(), 60)
"heard"
"""
    future = mesh2.run(code)
    wait_until(lambda: all("wait_for" in str(each) for each in mesh2.stacks()))
    future.cancel()
    assert future.get(60).values() == ["heard"] * 2


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: None"])
def test_who_insists_is_heard_whatever_handler_is_set(mesh2: ProcMesh, handler: str) -> None:
    future = mesh2.run(f"import signal, time\nsignal.signal(signal.SIGINT, {handler})\nx = 1\ntime.sleep(60)")
    _busy(mesh2)
    first = future.interrupt()  # type: ignore[attr-defined]
    assert set(first.stuck) == {0, 1} and "it deals with interrupts itself" in first.stuck[0]
    assert future.interrupt().obeyed == (0, 1)  # type: ignore[attr-defined]
    assert mesh2.run("x").get(30).values() == [1, 1]


def test_a_handler_that_raises_tears_no_message(mesh2: ProcMesh) -> None:
    code = """
import signal, time
def handler(*_): raise TimeoutError("from the handler")
signal.signal(signal.SIGINT, handler)
began = time.sleep(0.01)
for _ in range(100_000): display({"text/plain": "x" * 1000}, raw=True)  # formatters of IPython swallow errors
"""
    collector = Collector()
    run = start_cell(mesh2, code, on_output=collector)
    collector.wait_for(lambda: len(collector.displays) > 100, 60)
    run.future.cancel()
    with pytest.raises(errors.CallFailed, match="TimeoutError: from the handler"):
        run.future.get(60)
    assert mesh2.run("rank").get(30).values() == [0, 1]


SLOW_PICKLES = """
import time
class SlowValue:
    def __reduce_ex__(self, protocol):
        time.sleep(600)
class SlowError(Exception):
    def __reduce_ex__(self, protocol):
        time.sleep(600)
"""


def test_the_pickling_of_a_result_is_part_of_the_call_and_takes_interrupts(mesh2: ProcMesh) -> None:
    mesh2.run(SLOW_PICKLES).get(60)
    future = mesh2.evaluate("SlowValue()")
    with pytest.raises(errors.CallTimeout):
        future.get(1)
    assert all("idle" not in place for place in states.where(mesh2).values()), states.where(mesh2)
    mesh2.interrupt()
    with pytest.raises(errors.CallFailed, match="KeyboardInterrupt"):
        future.get(30)
    assert mesh2.run("rank").get(30).values() == [0, 1]


def test_an_exception_that_takes_for_ever_to_pickle_is_told_by_its_text(mesh2: ProcMesh) -> None:
    mesh2.run(SLOW_PICKLES).get(60)
    with pytest.raises(errors.CallFailed, match="SlowError: the text"):
        mesh2.run("raise SlowError('the text')").get(30)
    assert mesh2.run("rank").get(30).values() == [0, 1]
