"""Meshes on a GPU. All of this folder is skipped where there is none: `make test-gpu` runs it; one card is enough.

The steps of `make verify-gpu` (`benchmarks.verify.checks`) are tests here as well; what is beside them asks for more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.verify.checks import spawn_pair
from meshbook import ProcMesh, shutdown, this_host
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
    """One rank on the first device, which is the default where there is one."""
    with this_host().spawn_procs({"gpus": 1}, name="card") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def pair(clean_end: None) -> Iterator[ProcMesh]:
    """Two ranks that share the first device."""
    with spawn_pair("cuda") as mesh:
        yield mesh


@pytest.fixture
def own_pair(clean_end: None) -> Iterator[ProcMesh]:
    """The same for a test that leaves them in a bad way."""
    with spawn_pair("cuda", "own") as mesh:
        yield mesh
