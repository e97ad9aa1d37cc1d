"""Spawning, ending, losing: what comes up, what is said, what is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import wait_until

from meshbook import ProcMesh, errors, this_host
from meshbook.lifecycle import MESH_NEXT, MeshEvent, MeshPhase
from meshbook.system.processes import is_same_process, start_time


def _processes(mesh: ProcMesh) -> list[tuple[int, int]]:
    recorded = [(status.pid, start_time(status.pid)) for status in mesh.status()]
    return [(pid, started) for pid, started in recorded if started is not None]


@pytest.mark.parametrize("module", ["meshbook", "meshbook.actor", "meshbook.agent.host_agent"])
def test_who_runs_no_cells_imports_neither_torch_nor_ipython(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'IPython'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_stop_leaves_no_process_and_further_calls_say_so() -> None:
    mesh = this_host().spawn_procs({"gpus": 3}, name="short")
    processes = _processes(mesh)
    assert len(processes) == 3
    mesh.stop()
    mesh.stop()
    assert not any(is_same_process(*process) for process in processes)
    with pytest.raises(errors.MeshStoppedError, match='mesh "short" was stopped'):
        mesh.run("1")


def test_stop_ends_busy_ranks_and_fails_their_calls() -> None:
    mesh = this_host().spawn_procs({"gpus": 2})
    processes = _processes(mesh)
    future = mesh.run("!sleep 100")
    time.sleep(0.3)
    mesh.stop()
    with pytest.raises(errors.MeshStoppedError):
        future.get(5)
    assert not any(is_same_process(*process) for process in processes)


def test_more_cuda_ranks_than_devices_is_one_clear_error() -> None:
    if Path("/proc/driver/nvidia/gpus").exists():
        pytest.skip("this host has CUDA devices")
    with pytest.raises(errors.DeviceError, match=r"2 ranks were asked for on .* which has 0 CUDA devices"):
        this_host().spawn_procs({"gpus": 2}, device="cuda")


def test_preloaded_modules_are_imported_once_for_all() -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=("wave",)) as mesh:
        assert mesh.run("import sys; 'wave' in sys.modules").get(30).values() == [True, True]


THREADED = """
import os, threading
owner = os.getpid()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_a_preload_that_starts_a_thread_is_imported_by_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded_module.py").write_text(THREADED)
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs({"gpus": 2}, preload=("threaded_module",)) as mesh:
        values = mesh.run("import os, threaded_module; threaded_module.owner == os.getpid()").get(30).values()
        assert values == [True, True]


def test_a_preload_that_does_not_exist_is_one_clear_error() -> None:
    with pytest.raises(errors.SpawnError, match="No module named 'no_such_module'"):
        this_host().spawn_procs({"gpus": 2}, preload=("no_such_module",))
    with this_host().spawn_procs({"gpus": 1}) as mesh:  # the host is none the worse
        assert mesh.run("rank").get(30).values() == [0]


def test_ranks_share_the_cores() -> None:
    with this_host().spawn_procs({"gpus": 2}) as mesh:
        threads = mesh.run("torch.get_num_threads()").get(30).values()
    assert threads == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2


SCRIPT = """
import os, sys
from meshbook import this_host
mesh = this_host().spawn_procs({"gpus": 2})
print(*(status.pid for status in mesh.status()), mesh._mesh.hosts[0].hello.pid, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


def _script(how: str) -> tuple[subprocess.Popen[str], list[tuple[int, int]]]:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdout is not None
    line = script.stdout.readline()
    recorded = [(pid, start_time(pid)) for pid in map(int, line.split())]
    return script, [(pid, started) for pid, started in recorded if started is not None]


def _close(script: subprocess.Popen[str]) -> None:
    script.wait(30)
    for pipe in (script.stdin, script.stdout):
        assert pipe is not None
        pipe.close()


def test_a_script_that_ends_without_stopping_leaves_nothing() -> None:
    script, processes = _script("end")
    _close(script)
    assert script.returncode == 0 and len(processes) == 3
    wait_until(lambda: not any(is_same_process(*process) for process in processes))


def test_killing_the_controller_ends_its_hosts_within_the_lease() -> None:
    script, processes = _script("wait")
    assert len(processes) == 3
    script.kill()
    _close(script)
    wait_until(lambda: not any(is_same_process(*process) for process in processes))


def test_a_mesh_only_goes_forward() -> None:
    with pytest.raises(errors.LocalProtocolError, match="cannot happen while stopped"):
        MESH_NEXT[MeshPhase.STOPPED, MeshEvent.STARTED]


@pytest.mark.slow
def test_more_ranks_than_a_socket_has_room_for() -> None:
    """The agent hands descriptors for each to its template, which answers for each, over one socket."""
    with this_host().spawn_procs({"gpus": 600}, torch=False, group=False) as mesh:
        assert sum(mesh.run("1").get(120).values()) == 600


COMING_UP = """
import time
from meshbook import this_host
def slow():
    import os
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(600)
this_host().spawn_procs({"gpus": 2}, bootstrap=slow, torch=False).initialized.get()
"""


def test_a_program_that_is_killed_as_its_mesh_comes_up_leaves_nothing() -> None:
    """Nobody could attach the mesh, so nothing waits for the lease, which is ten minutes."""
    with subprocess.Popen([sys.executable, "-c", COMING_UP], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        ranks = [program.stdout.readline().split()[-2:] for _ in range(2)]
        family = [psutil.Process(int(pid)) for pid in {pid for rank in ranks for pid in rank}]
        assert len(family) == 3, "two ranks, and their agent"
        program.kill()
    _, left = psutil.wait_procs(family, timeout=60)
    assert not [process for process in left if process.is_running()]
