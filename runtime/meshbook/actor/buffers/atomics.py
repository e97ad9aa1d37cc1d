"""Counters in buffers: changed by one process at a time, whichever asks, and the asker learns what was there before.

The owner's process makes every change, on a side thread and under one lock, whatever its own threads are doing, so that
they never overlap. Direct copies of the same bytes are not kept apart from them.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from meshbook.actor.buffers.memory import Memory
from meshbook.actor.errors import BufferKindError, BufferSizeError
from meshbook.errors import UsageError

WORD_BYTES = 8
_VALUES = 1 << 64

_lock = threading.Lock()


class AtomicChange(NamedTuple):
    """What becomes of the first 8 bytes of a buffer, read as a number. compare: only if this is there; None: add."""

    value: int
    compare: int | None = None

    def make(self, memory: Memory) -> bytes:
        """Change the memory; returns what was there."""
        word = memory.view(0, WORD_BYTES)
        with _lock:
            before = bytes(word)
            found = int.from_bytes(before, "little")
            if self.compare is None:
                found += self.value
            elif found == self.compare % _VALUES:
                found = self.value
            word[:] = memoryview((found % _VALUES).to_bytes(WORD_BYTES, "little"))
        return before


def check_operand(name: str, value: int) -> int:
    """Raises: UsageError for what does not fit 8 bytes."""
    if not isinstance(value, int) or not -_VALUES // 2 <= value < _VALUES:
        raise UsageError(f"{name} is a whole number of 8 bytes, with a sign or without, not {value!r}.")
    return value


def check_word(what: str, memory: Memory) -> None:
    """Raises: BufferKindError, BufferSizeError, for memory that cannot take a number."""
    if not memory.writable:
        raise BufferKindError(f"{what} is read-only; give memory that can be written, such as a tensor of torch.int64.")
    if memory.size_bytes < WORD_BYTES:
        raise BufferSizeError(f"{what} has {memory.size_bytes} bytes; a number takes {WORD_BYTES}.")
