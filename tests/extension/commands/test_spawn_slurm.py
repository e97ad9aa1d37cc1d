"""``%mesh spawn --on slurm`` in a notebook: it waits its turn, and what it says when it cannot."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
from engine_clusters import slurm_cluster

from benchmarks.slurm_nodes import SlurmNodes
from meshbook import shutdown

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes(empty_notebook) -> Iterator[SlurmNodes]:
    with slurm_cluster() as found:
        yield found
        empty_notebook.run("%mesh stop --all")
        shutdown()


def test_a_mesh_of_nodes_waits_in_the_queue_runs_cells_and_stops(empty_notebook, nodes: SlurmNodes) -> None:
    nodes.ask("salloc", "--no-shell", "-N3", "--exclusive")
    others = nodes.queue()[0].split()[0]

    def make_room() -> None:
        deadline = time.monotonic() + 60
        while not any("PENDING" in line for line in nodes.queue()) and time.monotonic() < deadline:
            time.sleep(0.05)
        nodes.ask("scancel", others)

    thread = threading.Thread(target=make_room)
    thread.start()
    options = "--no-torch --name far --env A=1 --cwd /tmp -- --time 10"
    spawned = empty_notebook.run(f"%mesh spawn hosts=2 gpus=1 --on slurm {options}").stdout
    thread.join()
    assert 'mesh "far": hosts=2, gpus=1, cpu, no process group; ready in' in spawned
    empty_notebook.run("%%mesh\nimport os\n(os.getcwd(), os.environ['A'], os.environ['SLURMD_NODENAME'])")
    assert empty_notebook["_mesh"].values() == [("/tmp", "1", "n1"), ("/tmp", "1", "n2")]
    (job,) = nodes.queue()
    nodes.ask("salloc", "--no-shell", "-N1", "-J", "meshbook")
    (other,) = {line.split()[0] for line in nodes.queue()} - {job.split()[0]}
    listed = empty_notebook.run("%mesh list").stdout
    assert f" of hosts), job {job.split()[0]}\n" in listed
    _, _, jobs = listed.partition("\njobs, as their engines have them:\n")
    assert "JOBID" in jobs and re.search(rf"^ +{other} .* meshbook .*n[123]$", jobs, re.M), listed
    nodes.ask("scancel", other)
    empty_notebook.run("%mesh stop far")
    assert nodes.queue() == []
