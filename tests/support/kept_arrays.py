"""Actors and functions that look at large arrays which their senders write to as soon as they have been sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshbook.actor import Actor, endpoint
from meshbook.actor.ports import Port

SIZE_BYTES = 24 << 20  # more than may be under way at once

Array = npt.NDArray[np.uint8]


def seen(array: Array) -> list[int]:
    """The values that occur in it."""
    return [int(value) for value in np.unique(array)]


class Keeper(Actor):
    @endpoint
    def see(self, array: Array) -> list[int]:
        """What came of an argument."""
        return seen(array)

    @endpoint
    def see_sent(self, port: Port[Array], others: Keeper) -> list[list[int]]:
        """Send an array to a port and to other actors, and write to it at once; what the others saw."""
        array = np.zeros(SIZE_BYTES, np.uint8)
        answers = others.see.call(array)
        port.send(array)
        array[:] = 7
        return answers.get(60).values()

    @endpoint
    def make(self) -> Array:
        """A result that this actor writes to afterwards."""
        self.made = np.zeros(SIZE_BYTES, np.uint8)
        return self.made

    @endpoint
    def spoil(self) -> None:
        """Write to it."""
        self.made[:] = 7
