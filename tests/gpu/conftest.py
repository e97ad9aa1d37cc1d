"""Meshes on a GPU. All of this folder is skipped where there is none: `make test-gpu` runs it.

One card is enough. NCCL refuses two ranks of one host on the same device, but takes them for two hosts when each has an
NCCL_HOSTID of its own, and lets them talk over sockets: so groups of several ranks can be aborted and formed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook import LocalLauncher, ProcMesh, shutdown, start_hosts, this_host
from meshbook.actor import BootstrapCommand, Point, default_bootstrap_cmd
from meshbook.system.devices import count_cuda_devices

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Counted without CUDA: a process that has used it must not fork."""
    if count_cuda_devices():
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def clean_end() -> Iterator[None]:
    """After each module nothing of us is left."""
    yield
    shutdown()


@pytest.fixture(scope="module")
def rank(clean_end: None) -> Iterator[ProcMesh]:
    """One rank on the first device."""
    with this_host().spawn_procs({"gpus": 1}, name="card") as mesh:
        yield mesh


def host_of_its_own(point: Point) -> BootstrapCommand:
    """For NCCL each rank is alone on its host."""
    return default_bootstrap_cmd().with_env({"NCCL_HOSTID": f"host{point.rank}", "NCCL_IB_DISABLE": "1"})


def spawn_pair(name: str) -> ProcMesh:
    """Two ranks on one device."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher())
    return hosts.spawn_procs({"gpus": 1}, name=name, device="cuda", bootstrap_command=host_of_its_own, owns_hosts=True)


@pytest.fixture(scope="module")
def pair(clean_end: None) -> Iterator[ProcMesh]:
    """Two ranks that share the first device."""
    with spawn_pair("pair") as mesh:
        yield mesh


@pytest.fixture
def own_pair(clean_end: None) -> Iterator[ProcMesh]:
    """The same for a test that leaves them in a bad way."""
    with spawn_pair("own") as mesh:
        yield mesh
