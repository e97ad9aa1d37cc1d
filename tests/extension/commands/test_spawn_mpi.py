"""``%mesh spawn --on mpi`` in a notebook: hosts of a real mpirun, and lines that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_hosts import mpi_hosts

from meshbook import shutdown

pytestmark = pytest.mark.cluster


def test_a_mesh_of_hosts_of_mpirun(empty_notebook, tmp_path: Path) -> None:
    with mpi_hosts("openmpi", tmp_path) as there:
        options = f"--no-torch --name far --env A=1 --cwd /tmp -- {' '.join(there.options('nodeA', 'nodeB'))}"
        spawned = empty_notebook.run(f"%mesh spawn hosts=2 gpus=1 --on mpi:{there.program} {options}").stdout
        assert 'mesh "far": hosts=2, gpus=1, cpu, no process group; ready in' in spawned
        empty_notebook.run("%%mesh\nimport os, platform\n(os.getcwd(), os.environ['A'], platform.node())")
        assert empty_notebook["_mesh"].values() == [("/tmp", "1", "nodeA"), ("/tmp", "1", "nodeB")]
        empty_notebook.run("%mesh stop far")
        shutdown()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on mpi", "say how many hosts of mpirun: hosts=N"),
        ("hosts=2 gpus=2 --on mpi -- -np 3", "mpirun cannot be given -np here: hosts=N says how many"),
        ("hosts=2 gpus=2 --on mpi:no-mpirun", "there is no no-mpirun on this machine"),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")
