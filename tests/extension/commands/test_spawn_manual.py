"""``%mesh spawn --on manual`` in a notebook: the command is shown at once."""

from __future__ import annotations

import sys

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
