"""What commands say of meshes that were made in Python only, and of actors there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from patience import wait_until

from meshbook.errors import WorkerLost
from meshbook_extension.widget.mesh_source import MeshSource

ACTORS = """
from meshbook import this_host
from meshbook.actor import Actor, endpoint
class Reader(Actor):
    @endpoint
    def read(self):
        return 1
loaders = this_host().spawn_procs({"gpus": 2}, name="loaders", device="cpu", group=False)
readers = loaders.spawn("readers", Reader)
readers.read.call().get(60)
"""


def test_actors_of_meshes_made_in_python_are_listed_without_a_current_mesh(empty_notebook: Any) -> None:
    assert "no mesh yet" in empty_notebook.fail("%mesh actors")
    empty_notebook.run(ACTORS)
    table = empty_notebook.run("%mesh actors").stdout
    assert table == 'mesh "loaders": gpus=2\n  readers  Reader  0,1  idle\n'
    empty_notebook.run("readers.stop().get(60)")
    assert empty_notebook.run("%mesh actors").stdout == 'mesh "loaders": gpus=2, no actors\n'
    empty_notebook.run("loaders.stop()")
    assert "no mesh yet" in empty_notebook.fail("%mesh actors")


FAULTS = """
from meshbook import this_host
from meshbook.actor import Actor, endpoint
class Loader(Actor):
    @endpoint
    def load(self):
        raise ValueError("bad shard")
loaders = this_host().spawn_procs({"gpus": 2}, name="loaders", device="cpu", group=False)
actors = loaders.spawn("actors", Loader)
actors.load.broadcast()
"""


def test_faults_of_actors_that_nobody_waits_for_are_among_the_errors_and_in_the_widget(empty_notebook: Any) -> None:
    empty_notebook.run(FAULTS)
    wait_until(lambda: "actors.load" in empty_notebook.run("%mesh errors").stdout)
    assert re.search(r"\[0,1\]  actors\.load  ValueError: bad shard", empty_notebook.run("%mesh errors").stdout)
    empty_notebook.run("%mesh use loaders")
    session = empty_notebook.shell._meshbook_session
    (shown,) = MeshSource(session, session.meshes["loaders"]).snapshot().errors
    assert (shown.what, shown.ranks, shown.headline) == ("actors.load", (0, 1), "ValueError: bad shard")
    empty_notebook.run("%mesh stop loaders")


def test_hints_after_a_death_are_for_the_mesh_that_it_was_on(empty_notebook: Any) -> None:
    dies = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)"
    for name in ("first", "second"):
        empty_notebook.run(f"%mesh spawn gpus=2 --device cpu --name {name} --no-group --out {name}")
    assert "not the current mesh" not in empty_notebook.fail(f"%%mesh\n{dies}")
    with pytest.raises(WorkerLost, match=r"repair: %mesh heal, or procs\.heal\(\)"):
        empty_notebook["first"].run(dies).get(60)
    assert "WorkerLost: rank 1" in (sent := empty_notebook.fail("%%mesh\nrank"))
    assert "procs.heal()" not in sent and "  rank 0 keeps its state    repair: %mesh heal" in sent
    empty_notebook.run("%mesh respawn rank=0,1")
    assert "state" not in empty_notebook.fail("%%mesh\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "state" not in empty_notebook.fail("%%mesh\nrank"), "none is left to keep any"
    empty_notebook["first"].heal()
    assert "it is not the current mesh; first: %mesh use first" in empty_notebook.fail(f"%%mesh first\n{dies}")
    empty_notebook.run("%mesh stop --all")


ALTERNATING = """
from meshbook import this_host
trainers, generators = (
    this_host().spawn_procs({"gpus": 1}, name=name, device="cpu", group=False) for name in ("trainers", "generators")
)
def say(*words): print(*words)
"""
TURNS = """
for k in range(20):
    trainers.execute(say, "train", k).get(60)
    generators.execute(say, "make", k).get(60)
"""


def test_calls_that_alternate_between_two_meshes_have_one_output_each(empty_notebook: Any) -> None:
    empty_notebook.run(ALTERNATING)
    listeners = empty_notebook["trainers"]._controller._dispatcher.calls._listeners
    before = len(listeners)
    ran = empty_notebook.run(TURNS)
    assert ran.stdout == "".join(f"[0] train {k}\n[0] make {k}\n" for k in range(20))
    assert len(listeners) == before + 2
    empty_notebook.run("trainers.stop(); generators.stop()")


TENSORS = """
import torch, meshbook
from meshbook.distributed import Mesh
mesh = Mesh(shape=(2,), mesh_dim_names=("gpus",))
x = meshbook.distribute(torch.ones(3, 4), mesh, ["gpus", None])
y = same = meshbook.ones(10, mesh=mesh)
model = meshbook.module_to_mesh(torch.nn.Linear(4, 4), mesh)
"""


def test_mesh_tensors_are_listed_with_what_ranks_hold(empty_notebook: Any) -> None:
    assert "no mesh tensors yet" in empty_notebook.run("%mesh tensors").stdout
    empty_notebook.run(TENSORS)
    title, *rows = empty_notebook.run("%mesh tensors").stdout.splitlines()
    assert title.startswith("Mesh(") and title.endswith("136 B to 152 B per rank in all tensors, named or not")
    assert [" ".join(row.split()) for row in rows] == [
        "x (3, 4) float32 Shard(dim=0) 16 B to 32 B per rank",
        "y, same (10,) float32 Replicate() 40 B per rank",
        "model (Linear) 2 tensors 80 B per rank",
    ]
    empty_notebook.run("mesh.stop()")
    assert "its ranks do not say what they hold" in empty_notebook.run("%mesh tensors").stdout


SHAPED = "from meshbook.distributed import Mesh\nm = Mesh(shape=(2, 1), mesh_dim_names=('a', 'b'))"


def test_a_mesh_of_a_shape_is_listed_and_found_again(empty_notebook: Any) -> None:
    empty_notebook.run("%mesh stop --all")
    assert 'mesh "main": a=2, b=1, cpu, gloo; ready in ' in empty_notebook.run(SHAPED).stdout
    pids = [status.pid for status in empty_notebook["m"].procs.status()]
    assert empty_notebook.run(SHAPED).stdout == 'on mesh "main" (a=2, b=1)\n'
    assert [status.pid for status in empty_notebook["m"].procs.status()] == pids
    assert "main" in empty_notebook.run("%mesh list").stdout
    empty_notebook.run("%mesh stop")
    assert "main" in empty_notebook.run(SHAPED).stdout
    assert [status.pid for status in empty_notebook["m"].procs.status()] != pids
    empty_notebook.run("%mesh stop")


def test_a_mesh_of_a_shape_lies_on_the_current_mesh_if_that_has_as_many_ranks(empty_notebook: Any) -> None:
    empty_notebook.run("%mesh stop --all")
    empty_notebook.run("%mesh spawn gpus=2 --device cpu")
    assert empty_notebook.run(SHAPED).stdout == 'on mesh "main" (gpus=2)\n'
    empty_notebook.run("import meshbook\ntotal = meshbook.ones(4, 4, mesh=m, sharding_spec=['a', 'b']).sum().item()")
    assert empty_notebook["total"] == 16.0
    told = empty_notebook.run("other = Mesh(shape=(3,), mesh_dim_names=('c',))").stdout
    assert 'mesh "main2": c=3' in told and 'cells go to mesh "main" as before' in told
    assert empty_notebook.run("again = Mesh(shape=(3,), mesh_dim_names=('c',))").stdout == 'on mesh "main2" (c=3)\n'
    assert empty_notebook.run("%%mesh\nworld_size").plain.strip() == "[0,1] 2"
    empty_notebook.run("%mesh stop --all")
