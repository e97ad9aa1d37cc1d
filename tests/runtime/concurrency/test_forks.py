"""Processes that user code forks on ranks and in the notebook: they answer for nobody and keep what they were given."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from collector import Collector
from patience import wait_until

from meshbook import ProcMesh, this_host
from meshbook.actor import Actor, endpoint
from meshbook.errors import CallFailed
from meshbook.mesh.rank_calls import start_cell

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(clean_end: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, name="forks", device="cpu") as mesh:
        yield mesh


class Echo(Actor):
    @endpoint
    def echo(self, value: Any) -> Any:
        return value


class Forker(Actor):
    """Its endpoints fork in ways that people do."""

    def __init__(self, echo: Any = None) -> None:
        self.echo, self.calls = echo, 0

    @endpoint
    def pid(self) -> int:
        self.calls += 1
        return os.getpid()

    @endpoint
    def returns(self) -> int:
        child = os.fork()
        return _exit_code(child) if child else -1

    @endpoint
    def raises(self) -> int:
        child = os.fork()
        if not child:
            raise ValueError("raised in the child")
        return _exit_code(child)

    @endpoint
    async def returns_from_a_coroutine(self) -> int:
        child = os.fork()
        return _exit_code(child) if child else -1

    @endpoint
    def child_calls(self) -> tuple[str, Any]:
        """What a child gets of the actor, and what its parent gets meanwhile."""
        fork = multiprocessing.get_context("fork")
        self.echo.echo.call_one("warm").get(30)
        before = self.echo.echo.call_one("before")
        queue: Any = fork.SimpleQueue()
        child = fork.Process(target=_tell, args=(queue, lambda: self.echo.echo.call_one("the child's").get(5)))
        child.start()
        mine = self.echo.echo.call_one("the parent's").get(30)
        child.join()
        return queue.get(), (before.get(30), mine)

    @endpoint
    def pool(self) -> list[int]:
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(abs, range(-4, 0)))


def _tell(queue: Any, action: Callable[[], Any]) -> None:
    try:
        queue.put(repr(action()))
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}")


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(mesh: ProcMesh, code: str) -> tuple[Collector, Any]:
    collector = Collector()
    run = start_cell(mesh, code, on_output=collector)
    return collector, run.future.get(60)


# ---- children that come back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("child", "code", "shown"),
    [
        ("pass", 0, ""),
        ("print('child', end='')", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('gone')", 1, "gone"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_child_that_comes_to_the_end_of_a_cell_ends(two: ProcMesh, child: str, code: int, shown: str) -> None:
    before = two.run("import os, sys; x = 'parent'; os.getpid()").get(30).values()
    cell = f"child = os.fork()\nif not child:\n    x = 'child'; {child}\nelse:\n    status = os.waitpid(child, 0)[1]"
    collector, _ = _run(two, cell)
    assert two.run("os.waitstatus_to_exitcode(status)").get(30).values() == [code] * 2
    for _ in range(4):
        assert two.run("os.getpid(), x").get(30).values() == [(pid, "parent") for pid in before]
    assert all(shown in collector.text(rank, "stderr") for rank in range(2))
    assert not shown or collector.text(0, "stderr").count(shown) == collector.text(1, "stderr").count(shown) > 0
    if "print" in child:
        collector.wait_for(lambda: all(collector.text(rank) == "child" for rank in range(2)))


def test_a_child_that_comes_back_from_a_function_ends(two: ProcMesh) -> None:
    def fork() -> tuple[int, int]:
        child = os.fork()
        return os.getpid(), _exit_code(child) if child else -1

    pids = two.run("import os; os.getpid()").get(30).values()
    assert two.execute(fork).get(30).values() == [(pid, 0) for pid in pids]
    assert two.run("os.getpid()").get(30).values() == pids


def test_a_child_that_comes_back_from_an_endpoint_ends(two: ProcMesh) -> None:
    actor = two.slice(gpus=0).spawn("forker", Forker)
    pid = actor.pid.call_one().get(30)
    assert actor.returns.call_one().get(30) == 0
    assert actor.raises.call_one().get(30) == 1
    assert actor.returns_from_a_coroutine.call_one().get(30) == 0
    assert [actor.pid.call_one().get(30) for _ in range(4)] == [pid] * 4
    assert two.run("import os; os.getpid()").get(30).values()[0] == pid


# ---- children that speak --------------------------------------------------------------------------------------------


def test_a_child_that_calls_an_actor_is_told_why_not_and_its_parent_gets_its_own_answer(two: ProcMesh) -> None:
    echo = two.slice(gpus=0).spawn("echo", Echo)
    forker = two.slice(gpus=1).spawn("caller", Forker, echo)
    told, mine = forker.child_calls.call_one().get(60)
    assert told.startswith("UsageError: process ") and "was forked from process" in told and "num_workers=0" in told
    assert mine == ("before", "the parent's")


def test_a_data_loader_whose_dataset_calls_an_actor_says_why_not(two: ProcMesh) -> None:
    echo = two.slice(gpus=0).spawn("source", Echo)
    two.push({"echo": echo}).get(30)
    code = """
from torch.utils.data import DataLoader, Dataset
class Remote(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return echo.echo.call_one(i).get(10)
def load(workers):
    return [int(i) for batch in DataLoader(Remote(), batch_size=2, num_workers=workers) for i in batch]
try: told = load(1)
except Exception as error: told = str(error)
told, load(0)
"""
    for told, loaded in two.run(code).get(120).values():
        assert "UsageError" in told and "num_workers=0" in told
        assert loaded == [0, 1, 2, 3]


def test_a_child_that_enters_a_collective_is_told_why_not(two: ProcMesh) -> None:
    code = """
import multiprocessing, torch, torch.distributed as dist
def work(queue):
    try: dist.all_reduce(torch.ones(1)); queue.put("no error")
    except BaseException as error: queue.put(f"{type(error).__name__}: {error}")
fork = multiprocessing.get_context("fork"); queue = fork.SimpleQueue()
child = fork.Process(target=work, args=(queue,)); child.start(); child.join()
x = torch.ones(1); dist.all_reduce(x)
queue.get(), x.item()
"""
    for told, value in two.run(code).get(60).values():
        assert told.startswith("UsageError: process ") and value == 2.0


def test_a_pool_of_an_actor_works_and_prints_no_traceback(two: ProcMesh) -> None:
    actor = two.slice(gpus=0).spawn("pools", Forker)
    before = two.logs(1000)[0]
    assert [actor.pool.call_one().get(60) for _ in range(2)] == [[4, 3, 2, 1]] * 2
    assert two.logs(1000)[0] == before


# ---- what children see ----------------------------------------------------------------------------------------------

WATCH = """
import multiprocessing, threading
fork = multiprocessing.get_context("fork")
go, told = fork.Event(), fork.SimpleQueue()
def look(data):
    go.wait(60)
    told.put((float(data.min()), float(data.max())))
child = fork.Process(target=look, args=(x,)); child.start()
del x
"""


def test_a_child_keeps_the_data_that_its_rank_was_given(two: ProcMesh) -> None:
    two.push({"x": np.full(1 << 20, 1.0)}).get(30)
    two.run(WATCH).get(30)
    for value in range(2, 5):
        two.push({"y": np.full(1 << 20, float(value))}).get(30)
    assert two.run("go.set(); r = told.get(); child.join(); r").get(60).values() == [(1.0, 1.0)] * 2
    assert two.run("float(y.min()), float(y.max())").get(30).values() == [(4.0, 4.0)] * 2


def test_what_children_have_kept_is_given_back_when_they_have_ended(two: ProcMesh) -> None:
    two.push({"x": np.full(1 << 20, 1.0)}).get(30)
    two.run(WATCH).get(30)
    kept = "import meshbook.values.lent_memory as lent; lent.withheld()"
    wait_until(lambda: two.run(kept).get(30).values() == [1, 1])  # those of earlier children are noticed to have ended
    two.run("go.set(); told.get(); child.join()").get(60)
    wait_until(lambda: two.run(kept).get(30).values() == [0, 0])
    assert two.run("lent._lent.forked").get(30).values() == [[], []]


def test_children_that_run_another_program_keep_nothing(two: ProcMesh) -> None:
    two.push({"x": np.full(1 << 20, 1.0)}).get(30)
    two.run(
        "import os\nif not (pid := os.fork()):\n    os.closerange(3, 100); os.execvp('sleep', ['sleep', '60'])\ndel x"
    ).get(30)
    try:
        kept = "import meshbook.values.lent_memory as lent; lent.withheld()"
        wait_until(lambda: two.run(kept).get(30).values() == [0, 0])
    finally:
        two.run("os.kill(pid, 9); os.waitpid(pid, 0)").get(30)


def test_a_child_of_the_notebook_keeps_the_results_that_it_was_given(two: ProcMesh) -> None:
    two.run("import numpy as np; data = np.full(1 << 20, 1.0)").get(30)
    given = [two.pull("data").get(30).values()[0]]
    fork = multiprocessing.get_context("fork")
    go, told = fork.Event(), fork.SimpleQueue()

    def look() -> None:
        go.wait(60)
        told.put((float(given[0].min()), float(given[0].max())))

    child = fork.Process(target=look)
    child.start()
    given.clear()
    for value in range(2, 5):
        two.run(f"data = np.full(1 << 20, {value}.0)").get(30)
        assert [float(each.max()) for each in two.pull("data").get(30).values()] == [value] * 2
    go.set()
    assert told.get() == (1.0, 1.0)
    child.join()


# ---- interrupts -----------------------------------------------------------------------------------------------------


def test_an_interrupt_reaches_processes_that_multiprocessing_has_forked(two: ProcMesh, tmp_path: Any) -> None:
    code = f"""
import multiprocessing, pathlib, time
def work(path):
    path.with_suffix(".begun").touch()
    try: time.sleep(60)
    except KeyboardInterrupt: path.with_suffix(".interrupted").touch()
child = multiprocessing.get_context("fork").Process(target=work, args=(pathlib.Path({str(tmp_path)!r}) / str(rank),))
child.start(); (pathlib.Path({str(tmp_path)!r}) / f"{{rank}}.started").touch(); child.join()
"""
    future = two.run(code)
    wait_until(lambda: len([*tmp_path.glob("*.begun"), *tmp_path.glob("*.started")]) == 4)
    two.interrupt()
    wait_until(lambda: len(list(tmp_path.glob("*.interrupted"))) == 2)
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        future.get(30)
    assert two.run("child.join(30); child.exitcode").get(60).values() == [0, 0]


@pytest.mark.parametrize("hook", ["before", "in_parent"])
def test_an_interrupt_in_the_midst_of_a_fork_comes_at_its_end(two: ProcMesh, tmp_path: Any, hook: str) -> None:
    """The hook says that it runs, and goes on until the test has interrupted."""
    code = f"""
import os, pathlib, time
from meshbook.concurrency import forks
folder, fork_of = pathlib.Path({str(tmp_path)!r}), forks.generation
def wait():
    if forks.generation == fork_of and not (folder / "interrupted").exists():
        (folder / str(rank)).touch()
        while not (folder / "interrupted").exists(): time.sleep(0.01)
        time.sleep(0.3)
forks.at_fork({hook}=wait)
if not os.fork(): os._exit(0)
time.sleep(600)
"""
    future = two.run(code)
    wait_until(lambda: len(list(tmp_path.glob("[01]"))) == 2)
    two.interrupt()
    (tmp_path / "interrupted").touch()
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        future.get(30)
    assert two.run("os.wait()[1]").get(30).values() == [0, 0]


FORKS = """
import os, signal, sys
from meshbook.concurrency import forks

forks.at_fork(**{sys.argv[1]: lambda: signal.raise_signal(signal.SIGINT)})
parent, (read, write) = os.getpid(), os.pipe()
try:
    os.fork()
    ended = "went on"
except KeyboardInterrupt:
    ended = "was interrupted"
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
if os.getpid() != parent:
    os.write(write, ended.encode())
    os._exit(0)
os.wait()
print(f"the parent {ended}, the child {os.read(read, 99).decode()}")
"""


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("before", "the parent was interrupted, the child went on"),
        ("in_parent", "the parent was interrupted, the child went on"),
        ("in_child", "the parent went on, the child was interrupted"),
    ],
)
def test_an_interrupt_in_a_hook_is_raised_in_its_process_when_the_fork_is_over(hook: str, said: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS, hook], capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr) == (f"{said}\n", "")


# ---- the notebook's process -----------------------------------------------------------------------------------------


def test_a_child_of_the_notebook_that_calls_a_mesh_is_told_why_not(two: ProcMesh) -> None:
    fork = multiprocessing.get_context("fork")
    actor = two.slice(gpus=0).spawn("asked", Echo)
    open_call = two.run("import time; time.sleep(600)")
    for action in (
        lambda: two.run("1").get(4),
        lambda: two.execute(os.getpid).get(4),
        lambda: two.push({"x": np.ones(1 << 20)}).get(4),
        lambda: actor.echo.call_one(1).get(4),
        lambda: open_call.get(4),
        lambda: two.interrupt(),
        lambda: two.stop(),
    ):
        told: Any = fork.SimpleQueue()
        child = fork.Process(target=_tell, args=(told, action))
        child.start()
        child.join(60)
        assert child.exitcode == 0 and told.get().startswith(f"UsageError: process {child.pid} was forked from process")
    two.interrupt()
    with pytest.raises(CallFailed, match="KeyboardInterrupt"):
        open_call.get(30)
    assert [two.run(f"{i}").get(30).values() for i in range(20)] == [[i, i] for i in range(20)]


def test_a_child_of_the_notebook_reads_results_that_have_come(two: ProcMesh) -> None:
    fork = multiprocessing.get_context("fork")
    future, told = two.run("rank"), fork.SimpleQueue()
    future.get(30)
    child = fork.Process(target=_tell, args=(told, lambda: future.get(4).values()))
    child.start()
    child.join(60)
    assert told.get() == "[0, 1]"


def test_a_child_of_the_notebook_drives_meshes_of_its_own(two: ProcMesh) -> None:
    fork = multiprocessing.get_context("fork")

    def drive() -> list[int]:
        from meshbook import shutdown

        try:
            with this_host().spawn_procs({"gpus": 1}, name="grandchild", device="cpu", group=False) as mesh:
                return mesh.run("6 * 7").get(60).values()
        finally:
            shutdown()

    told: Any = fork.SimpleQueue()
    child = fork.Process(target=_tell, args=(told, drive))
    child.start()
    child.join(120)
    assert told.get() == "[42]"
    assert two.run("1").get(30).values() == [1, 1]
