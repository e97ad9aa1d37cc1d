"""The mesh on which most of these tests have their tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshbook import ProcMesh, this_host
from meshbook.distributed import Mesh


@pytest.fixture(scope="module")
def grid(square: ProcMesh) -> Mesh:
    return Mesh(square)


@pytest.fixture
def hurt(clean_end: None) -> Iterator[Mesh]:
    """A mesh of two axes of one's own, of which ranks may end."""
    with this_host().spawn_procs({"dp": 2, "tp": 2}, name="hurt") as procs:
        yield Mesh(procs)
