"""A real Slurm on loopback, for tests: skipped where there is none, and held to leave nothing behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.slurm_nodes import SlurmNodes, slurm_nodes
from benchmarks.ssh_hosts import NoDaemonError


def slurm_processes() -> list[psutil.Process]:
    """What salloc and srun run as children of this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [child] if child.name() in ("salloc", "srun") else []
    return found


def tasks(nodes: SlurmNodes) -> list[psutil.Process]:
    """What runs on the nodes: agents and workers, which no process of ours is the parent of."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            ours = environment.get("SLURM_CONF") == nodes.environment["SLURM_CONF"]
            if ours and "SLURMD_NODENAME" in environment:
                found.append(process)
    return found


def await_quiet(nodes: SlurmNodes, timeout_s: float = 30.0) -> None:
    """Wait until no job is left in the queue, nor a client of Slurm among our children, nor a task on a node."""
    deadline = time.monotonic() + timeout_s
    while (left := [*nodes.queue(), *slurm_processes(), *tasks(nodes)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left


@contextlib.contextmanager
def slurm_cluster(patch: pytest.MonkeyPatch) -> Iterator[SlurmNodes]:
    """Nodes n1 to n3, which commands of Slurm find while the block runs; at the end nothing runs there any more."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(slurm_nodes(3))
        except NoDaemonError as error:
            pytest.skip(str(error))
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        yield nodes
        await_quiet(nodes)
