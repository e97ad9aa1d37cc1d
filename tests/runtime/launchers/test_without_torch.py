"""Ranks that have no torch: they do all that others do, but for collectives."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from collector import Collector
from patience import wait_until
from template_processes import torch_templates_of

from meshbook import ProcMesh, errors, this_host
from meshbook.actor import Actor, endpoint
from meshbook.mesh.rank_calls import start_cell

pytestmark = pytest.mark.usefixtures("no_lasting_template")

HAS_TORCH = "'torch' in __import__('sys').modules"


class Counter(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self, number: int) -> tuple[int, bool]:
        self.count += number
        return self.count, "torch" in sys.modules


MESH_OF_CELLS = """
from meshbook import this_host
procs = this_host().spawn_procs({"procs": 2}, torch=False)
procs.run("1").get(60)
"""

MESH_OF_ACTORS = """
from meshbook import this_host
from meshbook.actor import Actor, endpoint

class Greeter(Actor):
    @endpoint
    def greet(self) -> str:
        return "hello"

procs = this_host().spawn_procs({"procs": 2}, torch=False)
assert procs.spawn("greeters", Greeter).greet.call().get(60).values() == ["hello"] * 2
"""

WHO_HAS_WHAT = """
import json, sys, psutil
here = [module for module in ("torch", "numpy", "IPython", "asyncio", "zmq.asyncio") if module in sys.modules]
below = psutil.Process().children(recursive=True)
with_torch = [each.cmdline() for each in below if any("libtorch" in file.path for file in each.memory_maps())]
print(json.dumps([here, len(below), with_torch]))
"""


@pytest.mark.quick("program0")
@pytest.mark.parametrize("program", [MESH_OF_CELLS, MESH_OF_ACTORS])
def test_no_process_of_a_program_that_wants_no_torch_imports_it(program: str) -> None:
    said = subprocess.run([sys.executable, "-c", program + WHO_HAS_WHAT], capture_output=True, text=True, timeout=90)
    assert said.returncode == 0, said.stderr
    here, processes, with_torch = json.loads(said.stdout)
    assert here == with_torch == []
    assert processes == 4  # an agent, its template, the ranks


def _spawn(count: int = 2) -> ProcMesh:
    return this_host().spawn_procs({"procs": count}, torch=False)


@pytest.mark.slow
def test_ranks_are_there_without_torch_and_serve_cells_values_and_actors(clean_end: None) -> None:
    with _spawn() as mesh:
        said = Collector()
        start_cell(mesh, "import numpy; x = numpy.ones(2) * rank; print(rank, device)", on_output=said).future.get(30)
        assert [said.text(rank) for rank in range(2)] == ["0 cpu\n", "1 cpu\n"]
        assert mesh.slice(procs=1).pull("x").get(30).values()[0].tolist() == [1.0, 1.0]
        counters = mesh.spawn("counters", Counter)
        assert counters.add.call(2).get(30).values() == [(2, False)] * 2
        assert mesh.run(HAS_TORCH).get(30).values() == [False] * 2
        assert [status.where for status in mesh.status()] == ["idle"] * 2


def test_an_interrupt_ends_what_runs_without_torch(clean_end: None) -> None:
    with _spawn() as mesh:
        future = mesh.run("import time; time.sleep(60)")
        wait_until(lambda: all("sleep" in status.where or "line 1" in status.where for status in mesh.status()))
        future.interrupt()
        began = time.monotonic()
        with pytest.raises(errors.MeshError):
            future.get(30)
        assert time.monotonic() - began < 10
        assert mesh.run("rank").get(30).values() == [0, 1]


def test_collectives_and_groups_are_refused_in_words(clean_end: None) -> None:
    with _spawn() as mesh:
        for refused in (
            lambda: mesh.run("dist.all_reduce(1)").get(30),
            lambda: mesh.rebuild_groups(),
            lambda: (mesh.run("x = 1").get(30), mesh.broadcast("x", 0).get(30)),
        ):
            with pytest.raises(errors.MeshError, match="this mesh was spawned without torch"):
                refused()
        assert mesh.run("rank").get(30).values() == [0, 1]


@pytest.mark.slow
def test_code_may_import_torch_itself_and_tensors_then_travel(clean_end: None) -> None:
    with _spawn(1) as mesh:
        assert mesh.run("import torch; torch.ones(3).sum().item()").get(60).values() == [3.0]
        assert mesh.pull("torch.arange(3)").get(30).values()[0].tolist() == [0, 1, 2]


def test_a_rank_that_ended_comes_back_without_torch_and_the_mesh_grows_so(clean_end: None) -> None:
    with _spawn() as mesh:
        mesh.slice(procs=1).run("import os; os._exit(3)").exception(30)
        mesh.heal()
        grown = mesh.grow(procs=1)
        assert grown.run(HAS_TORCH).get(60).values() == [False] * 3


@pytest.mark.slow
def test_a_mesh_beside_it_has_torch_and_the_two_templates_stay(clean_end: None) -> None:
    with _spawn() as mesh, this_host().spawn_procs({"gpus": 2}) as other:
        assert other.run("dist.all_reduce(t := torch.ones(1)); t.item()").get(30).values() == [2, 2]
        assert mesh.run(HAS_TORCH).get(30).values() == [False] * 2
        agent = mesh._mesh.hosts[0].hello
        assert agent is not None
        pids = [status.pid for each in (mesh, other) for status in each.status()]
        assert len(torch_templates_of(agent.pid, pids)) == 1


def test_modules_may_be_loaded_before_the_fork(clean_end: None) -> None:
    with this_host().spawn_procs({"procs": 1}, torch=False, preload=("decimal",)) as mesh:
        assert mesh.run("'decimal' in __import__('sys').modules").get(30).values() == [True]
        assert mesh.run(HAS_TORCH).get(30).values() == [False]
