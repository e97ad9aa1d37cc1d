"""What the tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controllers import Zygote, alone
from engine_clusters import slurm_cluster
from engine_hosts import Shown

import meshbook
from benchmarks.slurm_nodes import SlurmNodes


@pytest.fixture(scope="module")
def zygote(clean_end: None) -> Iterator[Zygote]:
    """Starts the programs of controllers that are killed."""
    meshbook.shutdown()
    with alone() as started:
        yield started


@pytest.fixture(scope="module")
def nodes(clean_end: None) -> Iterator[SlurmNodes]:
    """Nodes n1 to n3 of Slurm."""
    with slurm_cluster() as found:
        yield found
        meshbook.shutdown()


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What was printed so far."""
    return Shown(capsys)
