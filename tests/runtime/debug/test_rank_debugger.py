"""Ranks that stop at breakpoints, without a notebook: what they tell, what they do with lines, how they go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from meshbook import ProcMesh
from meshbook.calls.call_future import CellRun
from meshbook.calls.rank_state import LastError
from meshbook.errors import CallFailed, CallInterrupted, LeftStopped, WorkerLost
from meshbook.mesh import states
from meshbook.mesh.driven import set_front_end
from meshbook.mesh.proc_view import ask
from meshbook.mesh.prompt import DebugPrompt
from meshbook.mesh.rank_calls import start_cell
from meshbook.wire.frames import MAX_FRAME_BYTES

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from collector import Collector

CELL = 7
ENOUGH_S = 20.0


class Script:
    """A terminal at which the lines of a script are typed, and nothing after them."""

    def __init__(self, *lines: str | Callable[[], str | None]) -> None:
        self.lines, self.shown = list(lines), ""

    def show(self, texts: Mapping[int, str]) -> None:
        for rank, text in texts.items():
            self.shown += "".join(f"[{rank}] {line}\n" for line in text.splitlines())

    def say(self, text: str) -> None:
        self.shown += f"{text}\n"

    def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str | None:
        assert self.lines, f"nobody types at {prompt}\n{self.shown}"
        line = self.lines.pop(0)
        if callable(line):
            line = line()
            while line is None and is_open():
                time.sleep(0.01)
            is_open()
        self.shown += f"{prompt}{line}\n"
        return line


class Person:
    """Attends calls that are waited for; or says why nobody does."""

    def __init__(self, script: Script | None = None, refusal: str = "") -> None:
        self.script, self._refusal = script, refusal

    def refusal(self) -> str:
        return self._refusal

    def attend(self, procs: ProcMesh, is_over: Callable[[], bool]) -> bool:
        assert self.script is not None
        return DebugPrompt(procs, self.script).attend(is_over)


@pytest.fixture(autouse=True)
def person(mesh4: ProcMesh) -> Iterator[None]:
    """Nobody types but the test's own script, and no rank stays stopped after it."""
    set_front_end(prompt_handler=Person(Script()))
    yield
    set_front_end()
    while states.busy(mesh4):
        mesh4.interrupt()


def start(mesh: ProcMesh, code: str) -> CellRun:
    return start_cell(mesh, code, on_output=Collector(), cell_number=CELL, line_offset=1)


def wait_stopped(mesh: ProcMesh, ranks: Iterable[int]) -> None:
    wanted = set(ranks)
    assert states.stopped_ranks(mesh).wait_for(
        lambda: states.stopped_ranks(mesh).of(mesh.ranks).keys() == wanted, ENOUGH_S
    ), mesh.status()


def debug(mesh: ProcMesh, run: CellRun, *lines: str | Callable[[], str | None]) -> str:
    script = Script(*lines)
    prompt = DebugPrompt(mesh, script)
    while not run.future.done():
        states.stopped_ranks(mesh).wait_for(lambda: run.future.done() or bool(states.stopped_ranks(mesh)), 0.05)
        if states.stopped_ranks(mesh) and prompt.attend(run.future.done):
            break
    assert not script.lines, script.shown
    return script.shown


def test_a_stopped_rank_says_where_and_others_wait(mesh4: ProcMesh) -> None:
    run = start(mesh4, "x = rank\nif rank == 2:\n    breakpoint()\ndist.barrier()")
    wait_stopped(mesh4, [2])
    status = mesh4.status()
    assert (status[2].state, status[2].where) == ("pdb", f"cell {CELL}, line 4") and status[0].state != "pdb"
    assert f"[2] > <cell {CELL}>(4)<module>()\n[2] -> breakpoint()\n" in debug(mesh4, run, "c")
    run.future.get(ENOUGH_S)
    assert mesh4.status()[2].state == "idle"


def test_a_line_that_no_message_carries_is_refused_at_the_prompt(mesh4: ProcMesh) -> None:
    run = start(mesh4, "if rank == 2: breakpoint()")
    wait_stopped(mesh4, [2])
    shown = debug(mesh4, run, f"x = 1  # {'x' * MAX_FRAME_BYTES}", "p rank", "c")
    assert "are too much for a message" in shown and "[2] 2\n" in shown
    run.future.get(ENOUGH_S)


def test_a_line_is_for_one_prompt_only(mesh4: ProcMesh) -> None:
    run = start(mesh4, "count = 0\nif rank == 0:\n    breakpoint()")
    wait_stopped(mesh4, [0])
    number = states.stopped_ranks(mesh4).number(0)
    for _ in range(3):
        states.type_line(mesh4, "count += 1", {0: number})
    assert states.stopped_ranks(mesh4).wait_for(lambda: states.stopped_ranks(mesh4).number(0) > number, ENOUGH_S)
    time.sleep(0.1)
    assert "[0] 1\n" in debug(mesh4, run, "p count", "c")


@pytest.mark.slow
def test_collectives_wait_for_a_stopped_rank_beyond_the_timeout_of_their_group(mesh4: ProcMesh) -> None:
    code = (
        "from datetime import timedelta\nquick = dist.new_group(timeout=timedelta(seconds=1))\n"
        "if rank == 1:\n    breakpoint()\nt = torch.ones(1)\ndist.all_reduce(t, group=quick)\n"
        "if rank == 0: dist.send(t, 1, group=quick)\nif rank == 1: breakpoint(); dist.recv(t, 0, group=quick)\nt.item()"
    )
    run = start(mesh4, code)
    wait_stopped(mesh4, [1])
    time.sleep(2.5)

    def late() -> str:
        time.sleep(2.0)
        return "c"

    shown = debug(mesh4, run, "ranks", "c", late)
    assert f"[0,2,3]  in all_reduce (cell {CELL}, line 7)" in shown
    assert set(run.future.get(ENOUGH_S).values()) == {4.0}
    run = start(mesh4, "if rank == 1: __import__('time').sleep(2)\ndist.all_reduce(torch.ones(1), group=quick)")
    with pytest.raises(CallFailed, match="all_reduce: Operation timed out after 1 s"):
        run.future.get(ENOUGH_S)


def test_stepping_goes_from_statement_to_statement_and_into_functions(mesh4: ProcMesh) -> None:
    code = "def f(a):\n    b = a * 2\n    return b\nif rank == 3: breakpoint()\ny = f(rank)\nz = y + 1\nz"
    run = start(mesh4, code)
    shown = debug(mesh4, run, "n", "s", "n", "a", "!b = 10", "r", "n", "p y", "c")
    assert "[3] -> y = f(rank)" in shown and "--Call--" in shown
    assert "[3] -> b = a * 2" in shown and "[3] a = 3" in shown
    assert "[3] -> z = y + 1" in shown
    assert list(run.future.get(ENOUGH_S).values())[:3] == [1, 3, 5]


def test_q_ends_the_cell_on_one_rank_and_frees_the_others(mesh4: ProcMesh) -> None:
    run = start(mesh4, "if rank == 1: breakpoint()\ndist.barrier()")
    debug(mesh4, run, "q")
    with pytest.raises(CallFailed) as caught:
        run.future.get(ENOUGH_S)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.ename, failure.evalue) == (1, "BdbQuit", "ended by q at its prompt")
    assert len("".join(failure.traceback).splitlines()) == 1
    assert sorted(caught.value.freed) == [0, 2, 3]
    assert len(mesh4.run("dist.barrier()").get(ENOUGH_S)) == 4


def test_interrupt_ends_a_prompt_also_in_the_midst_of_a_command(mesh4: ProcMesh) -> None:
    run = start(mesh4, "if rank < 2: breakpoint()\ndist.barrier()")
    wait_stopped(mesh4, [0, 1])
    states.type_line(mesh4, "p __import__('time').sleep(60)", {1: states.stopped_ranks(mesh4).number(1)})
    time.sleep(0.3)
    run.interrupt()
    assert isinstance(run.future.exception(ENOUGH_S), CallFailed)
    assert states.stopped_ranks(mesh4).wait_for(lambda: not states.stopped_ranks(mesh4), ENOUGH_S)
    assert len(mesh4.run("dist.barrier()").get(ENOUGH_S)) == 4


def test_each_thread_of_a_rank_may_stop_one_after_the_other(mesh4: ProcMesh) -> None:
    code = (
        "import threading\ndone = []\ndef work(i):\n    breakpoint()\n    done.append(i)\n"
        "if rank == 0:\n    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]\n"
        "    for each in threads: each.start()\n    for each in threads: each.join()\nsorted(done)"
    )
    run = start(mesh4, code)
    shown = debug(mesh4, run, "p i", "c", "p i", "c")
    assert shown.count("-> breakpoint()") == 2
    assert next(iter(run.future.get(ENOUGH_S).values())) == [0, 1]


def test_a_breakpoint_in_a_process_that_the_rank_forked_says_why_not(mesh4: ProcMesh) -> None:
    code = (
        "import os\nif rank == 0:\n    if os.fork() == 0:\n        try:\n            breakpoint()\n"
        "        except Exception as error:\n            open(path, 'w').write(str(error))\n"
        "        os._exit(0)\n    os.wait()"
    )
    path = f"/dev/shm/meshbook-test-{os.getpid()}"
    mesh4.push({"path": path}).get(ENOUGH_S)
    try:
        mesh4.run(code).get(ENOUGH_S)
        assert "forked" in Path(path).read_text()
    finally:
        Path(path).unlink(missing_ok=True)


def test_other_debuggers_open_this_prompt(mesh4: ProcMesh) -> None:
    code = (
        "import pdb\nfrom IPython.core.debugger import set_trace\nif rank == 0:\n    pdb.set_trace()\n    set_trace()\n"
        "    pdb.Pdb().set_trace()\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n"
        "        pdb.post_mortem(error.__traceback__)\ndist.breakpoint(0)\n5"
    )
    shown = debug(mesh4, run := start(mesh4, code), "c", "c", "c", "p error", "q", "c")
    assert "[0] -> pdb.set_trace()" in shown and "[0] -> set_trace()" in shown
    assert "[0] -> pdb.Pdb().set_trace()" in shown and "ZeroDivisionError" in shown
    assert list(run.future.get(ENOUGH_S).values()) == [5] * 4


def test_without_a_person_the_breakpoint_raises_at_its_line(mesh4: ProcMesh) -> None:
    set_front_end(prompt_handler=Person(refusal="nobody is here"))
    with pytest.raises(CallFailed, match=r"not available on ranks here: nobody is here") as caught:
        start(mesh4, "x = 1\nbreakpoint()").future.get(ENOUGH_S)
    assert caught.value.failures[0].where == f"cell {CELL}, line 3"
    assert not states.stopped_ranks(mesh4)


def stop_on_one(rank_that_stops: int, value: int) -> int:
    """Travels to the ranks."""
    import torch.distributed

    if torch.distributed.get_rank() == rank_that_stops:
        breakpoint()
    return value


def test_a_call_that_is_waited_for_brings_the_person_to_its_prompt(mesh4: ProcMesh) -> None:
    script = Script("p value", "value = 8", "c")
    set_front_end(prompt_handler=Person(script))
    assert list(mesh4.execute(stop_on_one, 2, 5).get(ENOUGH_S).values()) == [5, 5, 8, 5]
    assert "[2] -> breakpoint()\n[2] (Pdb) p value\n[2] 5\n" in script.shown


def test_a_prompt_that_was_left_is_found_again(mesh4: ProcMesh) -> None:
    set_front_end(prompt_handler=Person(Script("detach")))
    future = mesh4.execute(stop_on_one, 3, 5)
    with pytest.raises(LeftStopped, match="rank 3 stays stopped in stop_on_one"):
        future.get(ENOUGH_S)
    assert states.stopped(mesh4) == (3,)
    states.stopped_ranks(mesh4).left.clear()
    set_front_end(prompt_handler=Person(Script("c")))
    assert len(future.get(ENOUGH_S)) == 4


def test_a_busy_rank_stops_at_its_next_line_when_asked(mesh4: ProcMesh) -> None:
    run = start(mesh4, "import time\nfor i in range(10**9):\n    time.sleep(0.01)\n    if i < 0: break")
    time.sleep(0.3)
    assert "cell" in ask(mesh4.select([2]), object, "pdb_break_in")[2]
    wait_stopped(mesh4, [2])
    assert mesh4.select([2]).status()[0].where in (
        f"cell {CELL}, line 3",
        f"cell {CELL}, line 4",
        f"cell {CELL}, line 5",
    )
    run.interrupt()
    assert isinstance(run.future.exception(ENOUGH_S), CallFailed)


def test_postmortem_has_the_frames_of_the_last_error(mesh4: ProcMesh) -> None:
    with pytest.raises(CallFailed):
        mesh4.run("def load(shard):\n    if rank == 1: raise ValueError('bad')\n    dist.barrier()\nload(3)").get(
            ENOUGH_S
        )
    told = ask(mesh4, LastError, "last_error")
    assert (told[1].ename, told[1].freed) == ("ValueError", False)
    assert (told[0].ename, told[0].freed) == ("GroupAborted", True)
    view = mesh4.select([0, 1])
    future = view.postmortem()
    script = Script("p shard", "cast p shard", "u", "q")
    states.stopped_ranks(view).wait_for(lambda: len(states.stopped_ranks(view).of([0, 1])) == 2, ENOUGH_S)
    DebugPrompt(view, script, post_mortem=True).attend(future.done, first=1)
    future.get(ENOUGH_S)
    assert "[1] -> if rank == 1: raise ValueError('bad')\n[1] (Pdb) p shard\n[1] 3\n" in script.shown
    assert "[1] (Pdb) cast p shard\n[0] 3\n[1] 3\n" in script.shown


def test_a_rank_killed_at_its_prompt_takes_no_line_along(mesh2: ProcMesh) -> None:
    run = start(mesh2, "breakpoint()")
    wait_stopped(mesh2, [0, 1])
    pid = mesh2.status()[0].pid

    def kill() -> str:
        os.kill(pid, signal.SIGKILL)
        assert states.stopped_ranks(mesh2).wait_for(lambda: 0 not in states.stopped_ranks(mesh2).of([0]), ENOUGH_S)
        return "c"

    shown = debug(mesh2, run, kill, "c")
    assert "rank 0 has ended; Enter goes to rank 1" in shown and "rank 0 has ended; not sent: c" in shown
    with pytest.raises(WorkerLost):
        run.future.get(ENOUGH_S)


def test_the_prompt_of_the_only_stopped_rank_closes_with_its_death(mesh2: ProcMesh) -> None:
    run = start(mesh2, "if rank == 1: breakpoint()")
    wait_stopped(mesh2, [1])
    pid = mesh2.status()[1].pid
    assert "not sent" not in debug(mesh2, run, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(WorkerLost):
        run.future.get(ENOUGH_S)


def test_a_stopped_rank_that_is_replaced_is_not_stopped_any_more(mesh2: ProcMesh) -> None:
    run = start(mesh2, "if rank == 1: breakpoint()")
    wait_stopped(mesh2, [1])
    mesh2.respawn(1)
    assert not states.stopped_ranks(mesh2) and mesh2.status()[1].state == "idle"
    with pytest.raises(WorkerLost):
        run.future.get(ENOUGH_S)
    run = start(mesh2, "breakpoint()")
    wait_stopped(mesh2, [0, 1])
    debug(mesh2, run, "cast c")
    run.future.get(ENOUGH_S)


def test_a_prompt_closes_when_its_mesh_is_stopped(mesh2: ProcMesh) -> None:
    run = start(mesh2, "breakpoint()")
    wait_stopped(mesh2, [0, 1])
    thread = threading.Timer(0.5, mesh2.stop)
    thread.start()
    debug(mesh2, run, lambda: None)
    thread.join()


def test_an_interrupt_at_the_prompt_of_a_call_reaches_its_ranks(mesh4: ProcMesh) -> None:
    class Pressing(Script):
        def read(self, prompt: str, is_open: Callable[[], bool], *, hidden: bool = False) -> str | None:
            raise KeyboardInterrupt

    set_front_end(prompt_handler=Person(Pressing()))
    with pytest.raises(CallInterrupted):
        mesh4.execute(stop_on_one, 1, 5).get(ENOUGH_S)
    assert not states.stopped_ranks(mesh4)
