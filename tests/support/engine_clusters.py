"""Clusters of real engines on this machine, for tests: skipped where there is none, and left with nothing running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import pytest

from benchmarks.ray_nodes import RayNodes, ray_nodes
from benchmarks.slurm_nodes import SlurmNodes, slurm_nodes
from benchmarks.ssh_hosts import LoopbackHosts, NoDaemonError, loopback_hosts

if TYPE_CHECKING:
    from benchmarks.k8s.cluster import KubernetesHere

Cluster = TypeVar("Cluster")


def clients(*words: str) -> list[psutil.Process]:
    """Return the processes below this one that are called by one of these words, or have it in their command."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found += [child] if {child.name(), *child.cmdline()}.intersection(words) else []
    return found


def drivers(engine: str) -> list[psutil.Process]:
    """Return the drivers of ours, of ``ray`` or ``k8s``."""
    return clients(f"meshbook.launchers.engines.{engine}_driver")


def tasks(nodes: SlurmNodes | RayNodes) -> list[psutil.Process]:
    """Return the agents and workers on the nodes, which no process of ours is the parent of."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if isinstance(nodes, SlurmNodes):
                ours = environment.get("SLURM_CONF") == nodes.environment["SLURM_CONF"]
                is_task = ours and "SLURMD_NODENAME" in environment
            else:
                on_node = int(environment.get("RAY_RAYLET_PID", 0)) in nodes.raylets
                is_task = on_node and any("meshbook" in word for word in process.cmdline())
            found += [process] if is_task else []
    return found


class SshHosts(LoopbackHosts):
    """`benchmarks.ssh_hosts.LoopbackHosts`, and what runs there."""

    def processes(self) -> list[psutil.Process]:
        """Return what runs for connections: daemons of their own, shells, agents, workers."""
        return psutil.Process(self.daemon.pid).children(recursive=True)


def left_in(cluster: object) -> list[object]:
    """Return what is left in a cluster, or here for it: jobs, clients, tasks, containers."""
    if isinstance(cluster, SshHosts):
        return [*cluster.processes(), *clients("ssh")]
    if isinstance(cluster, SlurmNodes):
        return [*cluster.queue(), *clients("salloc", "srun"), *tasks(cluster)]
    if isinstance(cluster, RayNodes):
        return [*cluster.left(), *drivers("ray"), *tasks(cluster)]
    return [*cluster.left(), *cluster.nodes.containers, *drivers("k8s")]  # type: ignore[attr-defined]


def await_quiet(cluster: object, timeout_s: float = 60.0) -> None:
    """Wait until nothing is left."""
    deadline = time.monotonic() + timeout_s
    while (left := left_in(cluster)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left


@contextlib.contextmanager
def _quiet_at_last(start: Callable[[], contextlib.AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    """Skip where a cluster cannot be had; at the end nothing runs there any more."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(start())
        except NoDaemonError as error:
            pytest.skip(str(error))
        yield cluster
        await_quiet(cluster)


@contextlib.contextmanager
def ssh_hosts() -> Iterator[SshHosts]:
    """Hosts as `benchmarks.ssh_hosts.loopback_hosts` has them."""

    @contextlib.contextmanager
    def start() -> Iterator[SshHosts]:
        with loopback_hosts() as found:
            yield SshHosts(found.folder, found.daemon)

    with _quiet_at_last(start) as hosts:
        yield hosts


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmNodes]:
    """Nodes n1 to n3, which commands of Slurm find while the block runs."""
    with pytest.MonkeyPatch.context() as patch, _quiet_at_last(slurm_nodes) as nodes:
        for name, value in nodes.environment.items():
            patch.setenv(name, value)
        yield nodes


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayNodes]:
    """Nodes r1 to r3."""
    with _quiet_at_last(ray_nodes) as nodes:
        yield nodes


@contextlib.contextmanager
def kubernetes_here(folder: Path) -> Iterator[KubernetesHere]:
    """A stand-in; the environment names no other cluster."""
    from benchmarks.k8s.cluster import stand_in  # it takes seconds to import

    with pytest.MonkeyPatch.context() as patch, _quiet_at_last(lambda: stand_in(folder)) as here:
        patch.delenv("KUBECONFIG", raising=False)
        yield here
