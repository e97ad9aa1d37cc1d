"""What a call costs in calls of Python functions: a figure without noise, which only goes down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from meshbook import ProcMesh

CALLS = 100

CONTROLLER_MAX = 210
"""On the main thread, which serves the sockets while it waits; measured: 202."""

RANK_MAX = 52
"""On the rank's main thread; measured: 47.5."""


class Counter:
    """Counts calls of Python functions on the thread that installs it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


@contextmanager
def counting() -> Iterator[Counter]:
    counter = Counter()
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(before)


def _count_from_now() -> None:
    sys.setprofile(Counter())


def _counted() -> int:
    counter = sys.getprofile()
    sys.setprofile(None)
    assert isinstance(counter, Counter)
    return counter.count


pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons inline other functions")


def test_a_call_costs_its_controller_few_calls_of_python(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    for _ in range(20):
        one.execute(abs, -1).get(30)
    with counting() as counter:
        for _ in range(CALLS):
            one.execute(abs, -1).get(30)
    assert counter.count / CALLS < CONTROLLER_MAX


def test_a_call_costs_its_rank_few_calls_of_python(mesh4: ProcMesh) -> None:
    one = mesh4.slice(gpus=0)
    one.execute(_count_from_now).get(30)
    for _ in range(CALLS):
        one.execute(abs, -1).get(30)
    (count,) = one.execute(_counted).get(30).values()
    assert count / CALLS < RANK_MAX
