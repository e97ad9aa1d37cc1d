"""Counts what something costs in calls of Python functions: a figure without noise, which only goes down."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from types import FrameType

import pytest

CALLS, BATCHES = 100, 5

only_on_3_11 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons inline other functions")


class Counter:
    """Counts calls of Python functions on the thread that installs it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


def usual(call: Callable[[], object], between: Callable[[], object] = lambda: None, *, batches: int = BATCHES) -> int:
    """How many calls of Python a ``call`` costs this thread, in the batch that was least disturbed.

    between: called before each, and not counted.
    """
    return min(_usual_of_batch(call, between) for _ in range(batches))


def _usual_of_batch(call: Callable[[], object], between: Callable[[], object]) -> int:
    counter, before, counts = Counter(), sys.getprofile(), [0]
    gc.disable()
    try:
        for _ in range(CALLS):
            between()
            sys.setprofile(counter)
            call()
            sys.setprofile(before)
            counts.append(counter.count)
    finally:
        sys.setprofile(before)
        gc.enable()
    return usual_step(counts)


def usual_step(counts: Sequence[int]) -> int:
    """By how much a count goes up each time: nearly all steps are the same, on an idle machine.

    What else is counted comes from outside: what is due once a second, what other tests have collections of garbage
    call, and, on a busy machine, that a call is waited for in several turns. A few calls cost less: another thread was
    quicker. So it is the step that a fifth of them do not exceed.
    """
    return sorted(after - before for before, after in itertools.pairwise(counts))[len(counts) // 5]
