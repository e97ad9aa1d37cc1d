"""``%mesh spawn --on manual`` in a notebook: the command is shown at once, and lines that make no sense are refused."""

from __future__ import annotations

import sys

import pytest
from joined import people

from meshbook import shutdown


def shown() -> str:
    """What the cell that runs shows so far; the notebook of these tests captures it."""
    return str(getattr(sys.stdout, "getvalue", str)())


def test_a_mesh_of_machines_that_are_started_by_hand(empty_notebook) -> None:
    with people(shown) as crowd:
        crowd.come(1)
        options = "--within 5m --no-torch --name far --env A=1 --cwd /tmp"
        spawned = empty_notebook.run(f"%mesh spawn hosts=1 gpus=1 --on manual {options}").stdout
        assert "run this on one machine until" in spawned and ", in 5 min" in spawned
        assert 'mesh "far": hosts=1, gpus=1, cpu, no process group; ready in' in spawned
        empty_notebook.run("%%mesh\nimport os\n(os.getcwd(), os.environ['A'])")
        assert empty_notebook["_mesh"].values() == [("/tmp", "1")]
        empty_notebook.run("%mesh stop far")
        assert crowd.machines[0].end().endswith("the mesh has ended\n")
    shutdown()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on manual", "say how many hosts you will start: hosts=N"),
        ("hosts=2 gpus=2 --on manual:192.0.2.77", '"192.0.2.77" means 192.0.2.77, which are others'),
        ("hosts=2 gpus=2 --on manual --within soon", '--within: "soon" is no duration'),
        ("hosts=2 gpus=2 --on manual -- -N 3", 'the engine manual has no options, but got "-N 3"'),
        ("gpus=2 --within soon", '--within: "soon" is no duration'),
        ("hosts=1 gpus=1 --on manual --within 1s", "nobody ran its command until"),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")
