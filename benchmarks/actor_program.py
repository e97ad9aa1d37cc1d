"""The work that is measured: one class for every package, and actors of it for those that have Monarch's names.

Standard library and numpy only: the peers' environments run it too.
"""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8]

COLLECTED_BYTES = 10_000_000
WARM_UP = 20  # round trips of a caller that are not kept


class Work:
    """What a rank does, whoever calls it. rank: its number."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.payload = np.zeros(1, np.uint8)
        self.made = np.zeros(0, np.uint8)

    def no_op(self) -> None:
        """Do nothing."""

    def import_torch(self) -> None:
        """Import what programs of ranks need."""
        import torch  # noqa: F401

    def pid(self) -> int:
        """Return our process."""
        return os.getpid()

    def hold(self, payload: Array) -> None:
        """Keep the payload."""
        self.payload = payload

    def held(self) -> tuple[int, int]:
        """Return length and first byte of the payload."""
        return len(self.payload), int(self.payload[0])

    def collect(self) -> Array:
        """Return the array that we made."""
        if not len(self.made):
            self.made = np.full(COLLECTED_BYTES, self.rank, np.uint8)
        return self.made

    def work(self, busy_s: float) -> None:
        """Raise on rank 3, sleep on the others."""
        if self.rank == 3:
            raise ValueError("shard 3 is bad")
        time.sleep(busy_s)


async def round_trips(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Call so many times, one after the other; return the seconds of each."""
    times = []
    for index in range(count + WARM_UP):
        started = time.perf_counter()
        await call()
        if index >= WARM_UP:
            times.append(time.perf_counter() - started)
    return times


class Program(NamedTuple):
    """Classes of actors: one that is called, and one that calls it."""

    target: Any
    caller: Any


def program(api: Any) -> Program:
    """Return the program with ``api`` as its ``monarch.actor``."""

    class Target(api.Actor):
        def __init__(self) -> None:
            Work.__init__(self, api.current_rank().rank)

        no_op, import_torch, pid = map(api.endpoint, (Work.no_op, Work.import_torch, Work.pid))
        hold, held, collect, work = map(api.endpoint, (Work.hold, Work.held, Work.collect, Work.work))

    class Caller(api.Actor):
        @api.endpoint
        async def round_trips(self, target: Any, count: int) -> list[float]:
            """Call ``target``."""
            return await round_trips(target.no_op.call_one, count)

    return Program(Target, Caller)
