"""Ranks that die: what the caller is told, how soon, and what the others keep."""

from __future__ import annotations

import os
import pickle
import re
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from collector import Collector
from patience import wait_until
from template_processes import children_of, torch_templates_of

from meshbook import LocalLauncher, ProcMesh, errors, start_hosts, this_host
from meshbook.errors import RankDeath, describe_deaths
from meshbook.mesh.rank_calls import start_cell
from meshbook.system.exits import End, OomWatch, describe_end, last_words
from meshbook.system.processes import is_same_process, start_time

pytestmark = pytest.mark.usefixtures("no_lasting_template")

SOON_S = 1.0
"""A death is known within 50 ms on a quiet machine; so much is granted to a busy one."""


@pytest.fixture
def loose4(clean_end: None) -> Iterator[ProcMesh]:
    """Four ranks without a process group: nobody waits for anybody."""
    with this_host().spawn_procs({"gpus": 4}, name="loose", group=False) as mesh:
        yield mesh


DEATHS = """
import os, signal, sys, time
print("rank", rank, "goes at", time.monotonic(), flush=True)
if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
if rank == 1: os.kill(os.getpid(), signal.SIGTERM)
if rank == 2: os._exit(7)
if rank == 3: os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.slow
def test_each_cause_is_named_and_known_soon(loose4: ProcMesh) -> None:
    seen: dict[int, float] = {}
    output = Collector()

    def listen(event: object) -> None:
        if type(event).__name__ == "RankDone":
            seen[event.rank] = time.monotonic()  # type: ignore[attr-defined]
        output(event)  # type: ignore[arg-type]

    run = start_cell(loose4, DEATHS, on_output=listen)
    with pytest.raises(errors.WorkerLost) as caught:
        run.future.get(10)
    causes = {death.rank: death.cause for death in caught.value.deaths}
    assert causes[0].startswith("killed by SIGKILL")
    assert causes[1] == "killed by SIGTERM, somebody asked it to end"
    assert causes[2] == "exit code 7, as by os._exit(7)"
    assert causes[3].startswith("killed by SIGBUS, memory that is not there")
    died = {rank: float(re.search(r"goes at ([\d.]+)", output.text(rank)).group(1)) for rank in range(4)}  # type: ignore[union-attr]
    assert statistics.median(seen[rank] - died[rank] for rank in range(4)) < SOON_S
    text = str(caught.value)
    assert re.search(r"^rank 1 on \S+ ended: killed by SIGTERM", text, re.M)
    assert "rank 1 goes at" in text, "the last lines of its log"


def test_a_crash_in_native_code_says_where_python_was(loose4: ProcMesh) -> None:
    code = "def crash():\n    import ctypes\n    ctypes.string_at(0)\ncrash()"
    with pytest.raises(errors.WorkerLost) as caught:
        loose4.slice(gpus=2).run(code).get(20)
    text = str(caught.value)
    assert re.search(r"rank 2 on \S+ ended: killed by SIGSEGV, a crash in native code", text)
    assert "Fatal Python error: Segmentation fault" in text
    assert re.search(r"^ +a cell, line 3, in crash", text, re.M)
    assert len(text.splitlines()) < 14


def test_an_abort_says_so(loose4: ProcMesh) -> None:
    with pytest.raises(errors.WorkerLost, match=r"killed by SIGABRT, native code called abort\(\)"):
        loose4.slice(gpus=0).run("import os; os.abort()").get(20)


def test_equal_deaths_are_one_error(loose4: ProcMesh) -> None:
    with pytest.raises(errors.WorkerLost) as caught:
        loose4.run("import os, signal\nif rank != 2: os.kill(os.getpid(), signal.SIGKILL)").get(20)
    assert caught.value.ranks == (0, 1, 3)
    assert str(caught.value).count("killed by SIGKILL") == 1
    assert str(caught.value).startswith("ranks 0,1,3 on ")
    assert dict(caught.value.partial) == {2: None}
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.ranks == (0, 1, 3) and str(again) == str(caught.value)
    with pytest.raises(errors.WorkerLost, match=r"ranks 0,1,3 on \S+ ended: killed by SIGKILL"):
        loose4.run("1").get(20)


def test_an_error_that_tells_of_the_last_ranks_promises_nothing_of_others(loose4: ProcMesh) -> None:
    with pytest.raises(errors.WorkerLost) as some:
        loose4.slice(gpus=[1, 2]).run("import os; os._exit(3)").get(20)
    assert "the other ranks keep their state" in str(some.value)
    with pytest.raises(errors.WorkerLost) as rest:
        loose4.slice(gpus=[0, 3]).run("import os; os._exit(3)").get(20)
    for error in (rest.value, pickle.loads(pickle.dumps(rest.value))):
        assert "other ranks" not in str(error) and "  repair: mesh.heal()    their logs: " in str(error)


def test_open_calls_fail_and_results_and_state_of_the_others_are_kept(loose4: ProcMesh) -> None:
    loose4.run("kept = rank * 10").get(30)
    running = loose4.run("import time\nif rank == 1: time.sleep(60)\nrank")
    behind = [loose4.slice(gpus=1).run(str(n)) for n in range(3)]
    output = Collector()
    watched = start_cell(loose4, "1", on_output=output)
    pid = loose4.status()[1].pid
    output.wait_for(lambda: len(output.done) == 3)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for future in (running, *behind, watched.future):
        with pytest.raises(errors.WorkerLost, match="rank 1 on"):
            future.get(10)
    assert time.monotonic() - killed < 2 * SOON_S
    assert dict(running.exception(0).partial) == {0: 0, 2: 2, 3: 3}  # type: ignore[union-attr]
    assert loose4.slice(gpus=[0, 2, 3]).pull("kept").get(30).values() == [0, 20, 30]
    assert loose4.lost == (1,)


def test_children_of_a_dead_rank_end_with_it(loose4: ProcMesh) -> None:
    pid = int(loose4.slice(gpus=3).run("import subprocess; subprocess.Popen(['sleep', '100']).pid").get(30).values()[0])
    started = start_time(pid)
    assert started is not None
    os.kill(loose4.status()[3].pid, signal.SIGKILL)
    _await_end([(pid, started)], 5)


LEAVES_ITS_SESSION = """
import os, subprocess
parted = subprocess.Popen(["sleep", "100"], start_new_session=True).pid
read, write = os.pipe()
if (child := os.fork()) == 0:
    os.setsid()
    daemon = subprocess.Popen(["sleep", "100"]).pid
    os.write(write, b"%d" % daemon)
    os._exit(0)
os.waitpid(child, 0)
parted, int(os.read(read, 20))
"""


@pytest.mark.some("end of the host")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "end of the host"])
def test_what_ranks_leave_in_sessions_of_their_own_ends_with_the_last_mesh(clean_end: None, how: str) -> None:
    hosts = start_hosts({"hosts": 1}, LocalLauncher())
    mesh = hosts.spawn_procs({"gpus": 2}, group=False)
    left = _with_start([pid for pids in mesh.run(LEAVES_ITS_SESSION).get(30).values() for pid in pids])
    assert len(left) == 4
    os.kill(mesh.status()[0].pid, signal.SIGKILL)
    if how == "stop":
        mesh.stop()
        _await_end(left, 10)
        with hosts.spawn_procs({"gpus": 1}, group=False) as again:
            assert again.run("rank").get(30).values() == [0]
    hosts.shutdown()
    _await_end(left, 10)


# ---- the OOM killer ------------------------------------------------------------------------------------------------


def _own_memory_cgroup() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup that may hold 100 MB, below our own."""
    own = _own_memory_cgroup()
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no memory cgroup of our own can be made here")
    folder = own / f"meshbook-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / "memory.limit_in_bytes"
        (limit if limit.exists() else folder / "memory.max").write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def test_the_oom_killer_is_named(loose4: ProcMesh, small_cgroup: Path) -> None:
    status = loose4.status()[1]
    (small_cgroup / "cgroup.procs").write_text(str(status.pid))
    with pytest.raises(errors.WorkerLost) as caught:
        loose4.run("if rank == 1: hog = bytearray(400 << 20)").get(30)
    match = re.search(
        r"rank 1 on \S+ ended: killed by SIGKILL, most likely the OOM killer \(peak RSS (\d+) MB\)", str(caught.value)
    )
    assert match and int(match[1]) > 100
    os.kill(loose4.status()[2].pid, signal.SIGKILL)  # the next one is somebody's kill -9
    with pytest.raises(errors.WorkerLost, match=r"rank 2 on .* killed by SIGKILL, as by kill -9"):
        loose4.slice(gpus=2).run("import time; time.sleep(20)").get(30)
    assert loose4.slice(gpus=[0, 3]).run("rank").get(30).values() == [0, 3]


def _kernel(root: Path, cgroup: str, vmstat: int, events: dict[str, int]) -> OomWatch:
    (root / "proc" / "7").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "7" / "cgroup").write_text(cgroup)
    (root / "proc" / "vmstat").write_text(f"nr_free 1\noom_kill {vmstat}\n")
    for path, count in events.items():
        (root / "cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / path).write_text(f"low 0\noom {count}\noom_kill {count}\n")
    return OomWatch(root / "proc", root / "cgroup")


@pytest.mark.parametrize(
    ("cgroup", "events", "more_vmstat", "more_events", "blamed"),
    [
        ("0::/job\n", {"job/memory.events": 2}, 1, {"job/memory.events": 3}, True),
        ("0::/job\n", {"job/memory.events": 2}, 4, {}, False),
        ("3:cpu:/x\n", {}, 1, {}, True),
    ],
    ids=["own cgroup", "another container", "no cgroup"],
)
def test_a_kill_is_blamed_on_the_killer_once_and_where_it_counted(
    tmp_path: Path, cgroup: str, events: dict[str, int], more_vmstat: int, more_events: dict[str, int], blamed: bool
) -> None:
    watch = _kernel(tmp_path, cgroup, 5, events)
    watch.sample([7])
    assert watch.blames(7) is False
    _kernel(tmp_path, cgroup, 5 + more_vmstat, more_events)
    assert [watch.blames(7), watch.blames(7)] == [blamed, False]


def test_without_counters_nobody_is_cleared() -> None:
    nowhere = Path("/nonexistent")
    watch = OomWatch(nowhere, nowhere)
    assert watch.blames(1) is None
    assert describe_end(End(-signal.SIGKILL, 0, None)) == "killed by SIGKILL, by kill -9 or the OOM killer"


# ---- texts ---------------------------------------------------------------------------------------------------------


def test_deaths_are_grouped_by_cause_with_their_hosts() -> None:
    deaths = [
        RankDeath(3, "b", "exit code 1"),
        RankDeath(0, "a", "exit code 1", "bye"),
        RankDeath(1, "a", "killed by SIGTERM"),
    ]
    assert describe_deaths(deaths) == [
        "ranks 0,3 on a and b ended: exit code 1",
        "  the last lines of rank 0:",
        "    bye",
        "rank 1 on a ended: killed by SIGTERM",
    ]


def test_last_words_of_a_crash_keep_what_was_printed_and_where_python_was() -> None:
    report = ["Fatal Python error: Bus error", "", "Current thread 0x1 (most recent call first):"]
    frames = ['  File "<cell 7>", line 3 in step', '  File "/x/IPython/core/a.py", line 1 in run']
    log = "\n".join([*(f"line {n}" for n in range(9)), *report, *frames, "", "Extension modules: numpy (total: 1)"])
    assert last_words(log, 2).splitlines() == [
        "line 7",
        "line 8",
        "Fatal Python error: Bus error",
        "  cell 7, line 3, in step",
    ]


# ---- agents and templates ------------------------------------------------------------------------------------------


def _agent_of(mesh: ProcMesh) -> int:
    hello = mesh._mesh.hosts[0].hello
    assert hello is not None
    return hello.pid


def _template_of(mesh: ProcMesh) -> psutil.Process:
    """The one that ranks with torch are forked from; an earlier mesh's may take a moment to end."""
    deadline = time.monotonic() + 20
    while True:
        templates = torch_templates_of(_agent_of(mesh), _pids(mesh))
        if len(templates) == 1:
            return templates[0]
        assert time.monotonic() < deadline, f"{templates} are templates below the agent {_agent_of(mesh)}"
        time.sleep(0.01)


def _pids(mesh: ProcMesh) -> list[int]:
    return [status.pid for status in mesh.status()]


def _with_start(pids: list[int]) -> list[tuple[int, int]]:
    recorded = [(pid, start_time(pid)) for pid in pids]
    return [(pid, started) for pid, started in recorded if started is not None]


@pytest.mark.quick("kill")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["kill", "crash"])
def test_an_agent_that_dies_takes_everything_with_it_and_the_next_spawn_starts_another(number: signal.Signals) -> None:
    mesh = this_host().spawn_procs({"gpus": 2}, group=False)
    agent = _agent_of(mesh)
    child = int(mesh.slice(gpus=1).run("import subprocess; subprocess.Popen(['sleep', '100']).pid").get(30).values()[0])
    family = _with_start([agent, child, _template_of(mesh).pid, *_pids(mesh)])
    assert len(family) == 5
    future = mesh.run("import time; time.sleep(60)")
    killed = time.monotonic()
    os.kill(agent, number)
    with pytest.raises(errors.WorkerLost) as caught:
        future.get(10)
    assert time.monotonic() - killed < 2 * SOON_S
    assert caught.value.ranks == (0, 1)
    assert f"its host is lost: the host agent ended (killed by {number.name}" in str(caught.value)
    _await_end(family, 5)
    mesh.stop()
    with this_host().spawn_procs({"gpus": 1}) as again:
        assert again.run("rank").get(30).values() == [0]


@pytest.mark.slow
def test_ranks_outlive_their_template_and_the_next_spawn_has_another(mesh4: ProcMesh) -> None:
    _template_of(mesh4).kill()
    assert mesh4.run("dist.all_reduce(torch.ones(1)); rank").get(30).values() == [0, 1, 2, 3]
    with this_host().spawn_procs({"gpus": 2}, group=False) as mesh:
        assert mesh.run("rank").get(30).values() == [0, 1]


@pytest.mark.slow
def test_a_template_that_dies_as_it_is_asked_is_replaced(mesh4: ProcMesh) -> None:
    template = _template_of(mesh4)
    template.suspend()  # it cannot answer
    killer = threading.Timer(0.5, template.kill)
    killer.start()
    try:
        with this_host().spawn_procs({"gpus": 2}, group=True) as mesh:
            assert not killer.is_alive(), "what was suspended has answered"
            assert mesh.run("dist.all_reduce(t := torch.ones(1)); t.item()").get(30).values() == [2, 2]
    finally:
        killer.join()
    assert _template_of(mesh4) != template
    assert mesh4.run("rank").get(30).values() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_second_template_that_dies_is_one_clear_error(mesh4: ProcMesh) -> None:
    first = _template_of(mesh4)
    first.suspend()

    def kill_two() -> None:
        time.sleep(0.5)
        first.kill()
        wait_until(lambda: first not in children_of(_agent_of(mesh4), _pids(mesh4)))
        _template_of(mesh4).kill()

    killer = threading.Thread(target=kill_two)
    killer.start()
    try:
        with pytest.raises(errors.SpawnError, match=r"the template process ended \(killed by SIGKILL"):
            this_host().spawn_procs({"gpus": 2}, group=False)
    finally:
        killer.join()
    with this_host().spawn_procs({"gpus": 2}, group=False) as mesh:
        assert mesh.run("rank").get(30).values() == [0, 1]
    assert mesh4.run("rank").get(30).values() == [0, 1, 2, 3]


CRASHES = "import ctypes, sys\nprint('loading weights', file=sys.stderr, flush=True)\nctypes.string_at(0)\n"


def test_a_preload_that_crashes_is_a_spawn_error_with_its_last_words(
    mesh4: ProcMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_module.py").write_text(CRASHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    with pytest.raises(errors.SpawnError) as caught:
        this_host().spawn_procs({"gpus": 2}, preload=("crashing_module",))
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert "the template process ended (killed by SIGSEGV, a crash in native code); its last words:" in text
    assert "loading weights" in text
    assert "crashing_module.py, line 3" in text
    assert mesh4.run("rank").get(30).values() == [0, 1, 2, 3]


def _await_end(processes: list[tuple[int, int]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in processes if is_same_process(*process)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)
