"""``%mesh spawn --on ENGINE`` in a notebook: lines that make no sense, and a command that is shown at once."""

from __future__ import annotations

import sys

import pytest
from joined import people

from meshbook import shutdown

MANUAL = "hosts=2 gpus=2 --on manual"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on batch:slurm -- --walltime=1:0:0", "say how many jobs, one for each host: hosts=N"),
        ("hosts=2 gpus=2 --on batch", "batch needs a scheduler: batch:pbs, batch:torque"),
        ("hosts=2 gpus=2 --on batch:pbss", 'Did you mean "pbs"? There is no "pbss"'),
        ("gpus=2 --on k8s -- --image i:1", "say how many pods of Kubernetes: hosts=N"),
        ("hosts=2 gpus=2 --on k8s", "Kubernetes needs an image that has meshbook in it, as in -- --image IMAGE"),
        (
            "hosts=2 gpus=2 --on k8s -- --image i:1 --gpu 8",
            "unrecognized arguments: --gpu 8. Options of Kubernetes are",
        ),
        ("hosts=2 gpus=2 --on k8s:ml -- --image i:1", 'the engine k8s has no hosts to name, but got "ml"'),
        ("hosts=2 gpus=2 --on k8", 'unknown engine "k8". Did you mean "k8s"?'),
        ("gpus=2 --on manual", "say how many hosts you will start: hosts=N"),
        (f"{MANUAL}:192.0.2.77", '"192.0.2.77" means 192.0.2.77, which are others'),
        (f"{MANUAL} --within soon", '--within: "soon" is no duration'),
        (f"{MANUAL} -- -N 3", 'the engine manual has no options, but got "-N 3"'),
        ("gpus=2 --within soon", '--within: "soon" is no duration'),
        ("hosts=1 gpus=1 --on manual --within 1s", "nobody ran its command until"),
        ("gpus=2 --on mpi", "say how many hosts of mpirun: hosts=N"),
        ("hosts=2 gpus=2 --on mpi -- -np 3", "mpirun cannot be given -np here: hosts=N says how many"),
        ("hosts=2 gpus=2 --on mpi:no-mpirun", "there is no no-mpirun on this machine"),
        ("gpus=2 --on ray", "say how many nodes of Ray: hosts=N"),
        ("hosts=2 gpus=2 --on ray -- --nodes 3", "unrecognized arguments: --nodes 3. Options of Ray are"),
        ("hosts=2 gpus=2 --on rya", 'unknown engine "rya". Did you mean "ray"?'),
        ("gpus=2 --on slurm", "say how many nodes of Slurm: hosts=N"),
        ("hosts=2 gpus=2 --on slurm:n1", "the engine slurm has no hosts to name"),
        ("hosts=2 gpus=2 --on slurm -- -N 3", "Slurm cannot be given -N here"),
        ("gpus=2 --on shh:nodeA", 'unknown engine "shh". Did you mean "ssh"?'),
        ("gpus=2 --on pbs", 'unknown engine "pbs". There is: local, ssh:HOST,.., slurm, k8s, ray[:ADDRESS]'),
        ("gpus=2 --on ssh", "ssh needs the names of hosts"),
        ("gpus=2 --on ssh:", "ssh needs the names of hosts"),
        ("gpus=2 --on ssh:a,,b", "a host is named as for ssh"),
        ("gpus=2 --on ssh:a,a", "host a is named more than once"),
        ("hosts=3 gpus=2 --on ssh:a,b", "hosts=3, but --on names 2"),
        ("gpus=2 --on ssh:a -- -N", "ssh cannot be given -N here"),
        ("gpus=2 --on local:a", "the engine local has no hosts to name"),
        ("gpus=2 -- -p 22", 'the engine local has no options, but got "-p 22"'),
        ("gpus=2 --python python3", "--python is for hosts elsewhere"),
        ("gpus=2 --env A", '--env takes NAME=VALUE, with commas between several; not "A"'),
        ("gpus=2 --cwd here", "cwd is a folder from / or ~"),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")


def test_errors_of_an_engine_reach_the_cell(empty_notebook) -> None:
    pytest.importorskip("ray")
    said = empty_notebook.fail("%mesh spawn --name none hosts=2 gpus=1 --on ray:127.0.0.1:1")
    assert "there is no Ray cluster at 127.0.0.1:1: Connection refused" in said


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
