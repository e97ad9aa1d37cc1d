"""The actors that are measured: one program for every package that has Monarch's names.

Standard library and numpy only: the peers' environments run it too.
"""

# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8]

WARM_UP = 20  # round trips of a caller that are not kept


class Program(NamedTuple):
    """Classes of actors: one that is called, and one that calls it."""

    target: Any
    caller: Any


def program(api: Any) -> Program:
    """The program with ``api`` as its ``monarch.actor``."""

    class Target(api.Actor):
        def __init__(self) -> None:
            self.payload = np.zeros(1, np.uint8)

        @api.endpoint
        def no_op(self) -> None:
            """Do nothing."""

        @api.endpoint
        def pid(self) -> int:
            """Return our process."""
            return os.getpid()

        @api.endpoint
        def hold(self, payload: Array) -> None:
            """Keep the payload."""
            self.payload = payload

        @api.endpoint
        def held(self) -> tuple[int, int]:
            """Return length and first byte of the payload."""
            return len(self.payload), int(self.payload[0])

    class Caller(api.Actor):
        @api.endpoint
        async def round_trips(self, target: Any, count: int) -> list[float]:
            """Call ``target`` so many times, one after the other; seconds of each."""
            times = []
            for index in range(count + WARM_UP):
                started = time.perf_counter()
                await target.no_op.call_one()
                if index >= WARM_UP:
                    times.append(time.perf_counter() - started)
            return times

    return Program(Target, Caller)
