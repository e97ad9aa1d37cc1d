"""What commands say of meshes that were made in Python only, and of actors there."""

from __future__ import annotations

from typing import Any

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
