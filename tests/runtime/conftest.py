"""Real meshes for the runtime's tests; starting one takes a fraction of a second once the template is warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook import LocalLauncher, ProcMesh, shutdown, start_hosts, this_host


@pytest.fixture(scope="module", autouse=True)
def clean_end() -> Iterator[None]:
    """After each module nothing of us is left: the leak check of the suite looks right after this."""
    yield
    shutdown()


@pytest.fixture(scope="module")
def mesh4(clean_end: None) -> Iterator[ProcMesh]:
    """Four ranks on one host, with a process group."""
    with this_host().spawn_procs({"gpus": 4}, name="four") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def square(clean_end: None) -> Iterator[ProcMesh]:
    """Four ranks with two axes, so with groups along each."""
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="square") as mesh:
        yield mesh


@pytest.fixture
def mesh2(clean_end: None) -> Iterator[ProcMesh]:
    """Two ranks of one's own, for tests that leave them in a bad way."""
    with this_host().spawn_procs({"gpus": 2}, name="two") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def mesh2x2(clean_end: None) -> Iterator[ProcMesh]:
    """Two agents that act as two hosts, two ranks each: payloads and store go over TCP."""
    hosts = start_hosts({"hosts": 2}, LocalLauncher(separate_hosts=True))
    with hosts.spawn_procs({"gpus": 2}, name="hosts") as mesh:
        yield mesh
