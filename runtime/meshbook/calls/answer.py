"""What goes into a reply. Apart from those who make them, so that the notebook need not import torch for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshbook.errors import Failure, MeshError
from meshbook.values.pickling import Pickled, dumps_bounded
from meshbook.wire import messages as wire
from meshbook.wire.frames import Buffer


class Outcome(NamedTuple):
    """A value, or a failure."""

    status: int
    value: object = None
    has_value: bool = False
    failure: Failure | None = None
    pickled: Pickled | None = None
    """The value's pickle, where it is known already."""
    what: str = "the result"
    """How an error names the value that cannot travel."""


EXCEPTION_MAX_BYTES = 1 << 16
"""An exception whose pickle is larger stays on its rank; its text always travels."""


def pack_failure(failure: Failure) -> list[Buffer]:
    """The payload of a reply that failed: its text, and the exception if that can travel."""
    fields = wire.encode(failure[:6])
    try:
        pickled = dumps_bounded(failure.exception, EXCEPTION_MAX_BYTES)
    except BaseException:  # a user's class may raise anything when it is pickled
        pickled = None
    return [fields] if pickled is None or pickled[1] else [fields, pickled[0]]


class Unavailable(tuple[Any, ...]):
    """Stands for buffers that could not be had here; whoever iterates over them gets the reason."""

    def __new__(cls, error: MeshError) -> Unavailable:
        made = super().__new__(cls, (None,))
        made.error = error
        return made

    error: MeshError

    def __iter__(self) -> Iterator[Any]:
        raise self.error
