"""A real Ray cluster on this machine, for tests: skipped where there is none, and held to leave nothing behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.ray_nodes import RayNodes, ray_nodes
from benchmarks.ssh_hosts import NoDaemonError


def drivers() -> list[psutil.Process]:
    """Drivers of ours among the children of this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "meshbook.launchers.engines.ray_driver" in child.cmdline():
                found.append(child)
    return found


def tasks(nodes: RayNodes) -> list[psutil.Process]:
    """Agents and workers on the nodes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            on_node = int(process.environ().get("RAY_RAYLET_PID", 0)) in nodes.raylets
            if on_node and any("meshbook" in word for word in process.cmdline()):
                found.append(process)
    return found


def await_quiet(nodes: RayNodes, timeout_s: float = 30.0) -> None:
    """Wait until there is no placement group, no driver among our children, and no agent on a node."""
    deadline = time.monotonic() + timeout_s
    while (left := [*nodes.left(), *drivers(), *tasks(nodes)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, left


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayNodes]:
    """Nodes r1 to r3; at the end nothing runs there any more."""
    with contextlib.ExitStack() as stack:
        try:
            nodes = stack.enter_context(ray_nodes(3))
        except NoDaemonError as error:
            pytest.skip(str(error))
        yield nodes
        await_quiet(nodes)
