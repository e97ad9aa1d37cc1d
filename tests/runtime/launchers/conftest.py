"""What the tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controllers import Zygote, alone
from engine_hosts import Shown

import meshbook


@pytest.fixture(scope="module")
def zygote(clean_end: None) -> Iterator[Zygote]:
    """Starts the programs of controllers that are killed."""
    meshbook.shutdown()
    with alone() as started:
        yield started


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What was printed so far."""
    return Shown(capsys)
