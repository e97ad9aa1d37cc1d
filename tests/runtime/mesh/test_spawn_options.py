"""How processes begin: their interpreter, their environment, and where on the machine they run."""

from __future__ import annotations

import asyncio
import os
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from meshbook import Point, attach, detach, this_host
from meshbook.agent.worker_pool import free_slots
from meshbook.errors import SpawnError, UsageError
from meshbook.mesh.driven import own_meshes
from meshbook.monarch import BootstrapCommand, default_bootstrap_cmd
from meshbook.wire.messages import Seat

CPU = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment of its own that finds what ours has."""
    return _environment(tmp_path_factory.mktemp("environment"))


def _environment(folder: Path, more: str = "pass") -> Path:
    """Make one, whose Python runs ``more`` first."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = "; ".join(f"site.addsitedir({each!r})" for each in site.getsitepackages())
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text(f"import site; {packages}; {more}\n")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_processes_run_another_interpreter_and_so_do_those_that_they_start(other_python: Path) -> None:
    host = this_host().with_python_executable(other_python)
    with host.spawn_procs({"gpus": 2}) as procs:
        told = procs.run("import sys, torch; (sys.executable, sys.prefix, float(torch.ones(2).sum()))").get(60)
        assert told.values() == [(str(other_python), str(other_python.parents[1]), 2.0)] * 2
        assert procs.run("dist.all_reduce(t := torch.ones(1)); float(t)").get(60).values() == [2.0, 2.0]
        started = "from meshbook import this_host; inner = this_host().spawn_procs({'x': 1}, torch=False)"
        started += "; inner.initialized.get()"
        procs.slice(gpus=0).run(started).get(60)
        (inner,) = (mesh for mesh in own_meshes() if mesh.id != procs.id)
        assert _executables(inner) == [str(other_python)]
        inner.stop()
        procs.respawn(1)
        assert _executables(procs) == [str(other_python)] * 2
    with this_host().spawn_procs({"gpus": 1}, torch=False) as procs:
        assert _executables(procs) == [sys.executable]


@pytest.mark.slow
def test_what_a_rank_starts_runs_a_named_interpreter_anew(tmp_path: Path) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexport WRAPPED=$$\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o700)
    host, read = this_host().with_python_executable(wrapper), "import os; os.environ['WRAPPED']"
    with host.spawn_procs({"gpus": 2}, torch=False) as procs, host.spawn_procs(name="beside", torch=False) as beside:
        (outer,) = {*procs.run(read).get(60).values(), *beside.run(read).get(60).values()}
        started = "inner = this_host().spawn_procs({'x': 2}, name='inner', torch=False); inner.initialized.get()"
        assert procs.slice(gpus=0).run(f"from meshbook import this_host; {started}").get(60).values() == [True]
        (inner,) = (mesh for mesh in own_meshes() if mesh.name == "inner")
        (anew,) = set(inner.run(read).get(60).values())
        assert anew != outer and psutil.pid_exists(int(anew))
        inner.stop()
        wait_until(lambda: not psutil.pid_exists(int(anew)), 60)
        procs.respawn(1)
        assert procs.run(read).get(60).values() == [outer] * 2


def test_a_mesh_of_a_rank_is_named_once_its_processes_can_be_called(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec "{sys.executable}" "$@"\n')
    slow.chmod(0o700)
    started = f"this_host().with_python_executable({str(slow)!r}).spawn_procs({{'x': 2}}, name='inner', torch=False)"
    with this_host().spawn_procs({"gpus": 1}, torch=False) as procs:
        procs.run(f"from meshbook import this_host; inner = {started}").get(60)
        wait_until(lambda: any(mesh.name == "inner" for mesh in own_meshes()), 60)
        (inner,) = (mesh for mesh in own_meshes() if mesh.name == "inner")
        assert inner.execute(abs, -3).get(60).values() == [3, 3]
        inner.stop()


def _executables(procs: Any) -> list[str]:
    return list(procs.run("import sys; sys.executable").get(60).values())


@pytest.mark.parametrize(("python", "why"), [("/nowhere/python", "with /nowhere/python"), ("/bin/false", "template")])
def test_an_interpreter_that_cannot_be_is_named(python: str, why: str) -> None:
    with pytest.raises(SpawnError, match=why):
        this_host().with_python_executable(python).spawn_procs({"gpus": 1}, torch=False)
    with pytest.raises(UsageError, match="named by its path"):
        this_host().with_python_executable("")


def test_an_interpreter_with_another_meshbook_is_refused(tmp_path: Path) -> None:
    python = _environment(tmp_path, "import meshbook._version; meshbook._version.__version__ = '0.0'")
    with pytest.raises(SpawnError, match=r"it is Python 3.*, meshbook 0\.0, this side .*; both sides need the same"):
        this_host().with_python_executable(python).spawn_procs({"gpus": 1}, torch=False)


def test_a_command_changes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    monkeypatch.setenv("GONE", "1")
    names = "import os; [os.environ.get(name) for name in ('HERE', 'GONE', 'MORE')]"
    command = default_bootstrap_cmd().with_env({"MORE": "2"}).with_env({"GONE": None})
    with this_host().spawn_procs({"gpus": 2}, bootstrap_command=command, torch=False) as procs:
        assert procs.run(names).get(60).values() == [["1", None, "2"]] * 2
    command.inherit_env = False
    with this_host().spawn_procs({"gpus": 1}, bootstrap_command=command) as procs:
        assert procs.run(names).get(60).values() == [[None, None, "2"]]
        assert procs.run("'PATH' in os.environ, os.environ['LOCAL_RANK']").get(60).values() == [(False, "0")]


def test_each_rank_has_a_command_of_its_own_and_keeps_it(other_python: Path) -> None:
    def command(point: Point) -> BootstrapCommand:
        program = str(other_python) if point["gpus"] == 1 else sys.executable
        return BootstrapCommand(program, env={"MINE": str(point.rank)})

    told = "import os, sys; (sys.executable, os.environ['MINE'])"
    expected = [(sys.executable, "0"), (str(other_python), "1")]
    with this_host().spawn_procs({"gpus": 2}, bootstrap_command=command, torch=False) as procs:
        assert procs.run(told).get(60).values() == expected
        procs.respawn([0, 1])
        assert procs.run(told).get(60).values() == expected
        with pytest.raises(UsageError, match="keeps its size: its bootstrap_command gave each rank its own"):
            procs.grow(gpus=1)


def test_what_is_no_command_is_refused() -> None:
    with pytest.raises(UsageError, match=r"runs PYTHON -m .*, not \[None, '-c', 'pass'\]: .*proc_bind"):
        BootstrapCommand(sys.executable, None, ["-c", "pass"], {})
    with pytest.raises(UsageError, match="or a function of a Point that gives one; got 7"):
        this_host().spawn_procs({"gpus": 1}, bootstrap_command=7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"bootstrap_command\({'gpus': 0}\) gave None"):
        this_host().spawn_procs({"gpus": 1}, bootstrap_command=lambda point: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="'MORE': 7 is none"):
        default_bootstrap_cmd().with_env({"MORE": 7})  # type: ignore[dict-item]


def test_processes_are_bound_and_stay_so() -> None:
    bind = [{"cpus": str(CPU)}, {"cpunodebind": "0", "membind": "0"}]
    with this_host().spawn_procs({"gpus": 2}, None, "bound", bind) as procs:
        assert procs.run(_BOUND).get(60).values()[0] == ([CPU], 1)
        assert procs.run(_MEMORY).get(60).values()[1] == "bind:0"
        procs.respawn(0)
        assert procs.run(_BOUND).get(60).values()[0] == ([CPU], 1)


_BOUND = "import os, torch; (sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
_MEMORY = "open('/proc/self/numa_maps').readline().split()[1]"


def test_later_controllers_know_how_ranks_begin() -> None:
    command = default_bootstrap_cmd().with_env({"MINE": "1"})
    name = f"kept by {os.getpid()}"  # sessions of other tests that run now are seen too
    this_host().spawn_procs({"gpus": 1}, name=name, proc_bind=[{"cpus": str(CPU)}], bootstrap_command=command)
    detach()
    procs = attach(name).meshes[0]
    procs.respawn(0)
    assert procs.run(f"import os; {_BOUND}[0], os.environ['MINE']").get(60).values() == [([CPU], "1")]
    procs.stop()


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ([{"cpus": "0"}], "a mapping for each of the 2 processes"),
        ({"cpus": "0"}, "a mapping for each of the 2 processes"),
        ([{"cpus": "0"}, {"cpu": "0"}], "not bound by 'cpu'; did you mean \"cpus\""),
        ([{"cpus": "0"}, {"cpus": "0-"}], "a text that lists numbers"),
        ([{"cpus": "0"}, {"cpus": "0", "physcpubind": "0"}], "all name CPUs"),
        ([{"cpus": "0"}, 7], "a binding maps names to numbers"),
    ],
)
def test_bindings_that_do_not_fit_are_refused(bind: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        this_host().spawn_procs({"gpus": 2}, proc_bind=bind)


@pytest.mark.parametrize(
    ("bind", "why"), [({"cpus": "60000"}, "may not use CPU 60000, but"), ({"cpunodebind": "999"}, "no NUMA node 999")]
)
def test_bindings_that_the_machine_has_not_are_named(bind: Mapping[str, str], why: str) -> None:
    with pytest.raises(SpawnError, match=why):
        this_host().spawn_procs({"gpus": 1}, proc_bind=[bind], torch=False)


def test_an_event_loop_goes_on_while_meshes_come_up_side_by_side() -> None:
    async def spawn() -> list[str]:
        start = [asyncio.to_thread(this_host().spawn_procs, {"gpus": 2}, name=name) for name in ("one", "two")]
        meshes = await asyncio.gather(*start)
        sums = [await mesh.run("dist.all_reduce(t := torch.ones(1)); float(t)") for mesh in meshes]
        assert [list(each.values()) for each in sums] == [[2.0, 2.0]] * 2
        for mesh in meshes:
            mesh.stop()
        return [mesh.name for mesh in meshes]

    assert asyncio.run(spawn()) == ["one", "two"]


def test_devices_are_those_of_local_ranks_in_whatever_order_these_begin() -> None:
    def seats(*local_ranks: int) -> list[Seat]:
        return [Seat(rank, rank, rank) for rank in local_ranks]

    assert free_slots(seats(0, 1, 2), ()) == [0, 1, 2]
    assert (free_slots(seats(1), ()), free_slots(seats(0, 2), (1,))) == ([1], [0, 2])
    assert free_slots(seats(0, 1), (1, 2)) == [0, 3]  # after a renumbering others may have those places
    assert free_slots(seats(2, 3), (2, 3)) == [0, 1]
