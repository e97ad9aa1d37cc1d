"""``%mesh spawn --on batch:SCHEDULER`` in a notebook: hosts are jobs of a real Slurm; lines that make no sense."""

from __future__ import annotations

import importlib.util

import pytest
from slurm_cluster import slurm_cluster

from meshbook import shutdown

# It is not imported to find out: that takes two seconds in each process that only collects the tests.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(importlib.util.find_spec("parsl") is None, reason="there is no parsl"),
]


def test_a_mesh_of_jobs(empty_notebook) -> None:
    with pytest.MonkeyPatch.context() as patch, slurm_cluster(patch) as nodes:
        line = "hosts=2 gpus=1 --on batch:slurm --no-torch --name far --env A=1 --cwd /tmp -- --walltime 0:30:00"
        spawned = empty_notebook.run(f"%mesh spawn {line}").stdout
        assert 'mesh "far": hosts=2, gpus=1, cpu, no process group; ready in' in spawned
        empty_notebook.run("%%mesh\nimport os\n(os.getcwd(), os.environ['A'], os.environ['SLURMD_NODENAME'])")
        assert sorted(empty_notebook["_mesh"].values()) == [("/tmp", "1", "n1"), ("/tmp", "1", "n2")]
        numbers = ", ".join(sorted(queued.split()[0] for queued in nodes.queue()))
        assert f"job {numbers}\n" in empty_notebook.run("%mesh list").stdout
        empty_notebook.run("%mesh stop far")
        shutdown()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gpus=2 --on batch:slurm -- --walltime=1:0:0", "say how many jobs, one for each host: hosts=N"),
        ("hosts=2 gpus=2 --on batch", "batch needs a scheduler: batch:pbs, batch:torque"),
        ("hosts=2 gpus=2 --on batch:pbss", 'Did you mean "pbs"? There is no "pbss"'),
        ("hosts=2 gpus=2 --on batch:lsf -- --walltime=1:0:0", "there is no bsub on this machine"),
    ],
)
def test_lines_that_make_no_sense(empty_notebook, line: str, said: str) -> None:
    assert said in empty_notebook.fail(f"%mesh spawn --name none {line}")
