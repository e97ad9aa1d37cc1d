"""What goes into a reply. Apart from those who make them, so that the notebook need not import torch for it."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from meshbook.concurrency.future import in_background
from meshbook.errors import Failure, MeshError
from meshbook.values.main_names import ATOMS
from meshbook.values.pickling import Pickled, dumps, dumps_bounded
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
    position: int = 0
    """Which of as large values it is that are to be joined."""


Packed: TypeAlias = tuple[int, list[Buffer], bytes, wire.SegmentRef | None]
"""An outcome as it travels: its status, frames, head where that is small, and large buffers in shared memory."""

EXCEPTION_MAX_BYTES = 1 << 16
EXCEPTION_S = 1.0
"""An exception whose pickle is larger, or takes longer, stays on its rank; its text always travels."""


def pack_failure(failure: Failure) -> list[Buffer]:
    """The payload of a reply that failed: its text, and the exception if that can travel."""
    try:
        fields = wire.encode((*failure[:6], failure.unmade))
    except Exception as problem:  # whoever waits needs some answer
        why = f"what was raised cannot travel: {type(problem).__name__}"
        return [wire.encode((failure.rank, failure.host, "SerializationError", why, (why,), "", failure.unmade))]
    pickled = _pickled_exception(failure.exception)
    return [fields] if pickled is None or pickled.buffers else [fields, pickled.head]


def _pickled_exception(error: object) -> Pickled | None:
    """None where it cannot travel, or its own code takes too long, which nobody could interrupt here."""
    pickle = functools.partial(dumps_bounded, error, EXCEPTION_MAX_BYTES)
    is_plain = type(error) in ATOMS or (
        isinstance(error, Exception)
        and getattr(builtins, type(error).__name__, None) is type(error)
        and all(type(each) in ATOMS for each in (*error.args, *vars(error).values()))
    )
    try:
        return pickle() if is_plain else in_background(pickle).get(EXCEPTION_S)
    except BaseException:  # a user's class may raise anything when it is pickled
        return None


def pack(
    answer: Outcome,
    write: Callable[[Sequence[Buffer]], wire.SegmentRef],
    describe: Callable[[BaseException], Failure],
) -> Packed:
    """Make a reply of an outcome; where its value cannot travel, the one that says so.

    write: copies large buffers into shared memory. describe: makes a failure of what a value raises.
    """
    if answer.failure is not None:
        return answer.status, pack_failure(answer.failure), b"", None
    if not answer.has_value:
        return answer.status, [], b"", None
    try:
        pickled = answer.pickled or dumps(answer.value, what=answer.what)
        head, large = pickled.head, pickled.buffers
        frames: list[Buffer]
        inline, frames = (head, []) if len(head) <= wire.INLINE_MAX_BYTES else (b"", [head])
        return answer.status, frames, inline, write(large) if large else None
    except BaseException as error:
        return wire.RAISED, pack_failure(describe(error)), b"", None


class Unavailable(tuple[object, ...]):
    """Stands for buffers that could not be had here; whoever iterates over them gets the reason."""

    def __new__(cls, error: MeshError) -> Unavailable:
        made = super().__new__(cls, (None,))
        made.error = error
        return made

    error: MeshError

    def __iter__(self) -> Iterator[object]:
        raise self.error
