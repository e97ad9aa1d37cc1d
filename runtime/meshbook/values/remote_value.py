"""A value that stayed on its rank, because it is large or cannot travel.

A module of its own because its name travels in pickles, and a notebook that reads one imports nothing else for it.
"""

from __future__ import annotations

import reprlib
from typing import NamedTuple

from meshbook.errors.advice import advice
from meshbook.formatting import format_bytes

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


class RemoteValue(NamedTuple):
    """Stands in a ValueMesh for the result of a cell that was not brought to the notebook."""

    rank: int
    type_name: str
    summary: str
    """Its shape and dtype, or the start of its repr."""

    @classmethod
    def describing(cls, value: object, rank: int) -> RemoteValue:
        """Describe ``value`` without moving it."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            return cls(rank, type(value).__name__, f"shape {tuple(shape)}, {dtype}")
        if isinstance(value, bytes | bytearray):  # whose repr is made whole before it is cut
            return cls(rank, type(value).__name__, format_bytes(len(value)))
        return cls(rank, type(value).__name__, _short.repr(value))

    def __repr__(self) -> str:
        bring = f"give it a name and bring it with {advice().pull}"
        return f"<{self.type_name} kept on rank {self.rank}: {self.summary}; {bring}>"
