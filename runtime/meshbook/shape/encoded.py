"""Shapes as bytes, laid out as Monarch does: numbers and counts have 8 bytes, the lowest first, and no sign.

texts      a count, then of each text its size in bytes and its UTF-8
numbers    a count, then each
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from meshbook.errors import LayoutError

_WIDTH = 8


def number_bytes(value: int) -> bytes:
    """Raises: LayoutError for what has a sign, or more than 8 bytes."""
    try:
        return struct.pack("<Q", value)
    except struct.error:
        raise LayoutError(f"{value} cannot be written in 8 bytes without a sign.") from None


def numbers_bytes(values: Sequence[int]) -> bytes:
    """Write a count, and the numbers."""
    return number_bytes(len(values)) + b"".join(map(number_bytes, values))


def texts_bytes(texts: Iterable[str]) -> bytes:
    """Write a count, and the texts."""
    encoded = [text.encode() for text in texts]
    return number_bytes(len(encoded)) + b"".join(number_bytes(len(text)) + text for text in encoded)


class Reader:
    """Reads what the functions above have written, in order. Raises: LayoutError where the bytes do not fit."""

    def __init__(self, data: bytes, what: str) -> None:
        """what: what they should be, for errors. Raises: TypeError for what is no bytes."""
        if not isinstance(data, bytes):
            raise TypeError(f"{what} is read from bytes, not from a {type(data).__name__}.")
        self._data, self._what, self._at = data, what, 0

    def _take(self, size_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + size_bytes]
        if len(taken) < size_bytes:
            raise self._misfit(f"they end {size_bytes - len(taken)} too early")
        self._at += size_bytes
        return taken

    def number(self) -> int:
        return int.from_bytes(self._take(_WIDTH), "little")

    def numbers(self) -> list[int]:
        return [self.number() for _ in range(self._count())]

    def texts(self) -> list[str]:
        try:
            return [self._take(self.number()).decode() for _ in range(self._count())]
        except UnicodeDecodeError:
            raise self._misfit("a name is no UTF-8") from None

    def end(self) -> None:
        if self._at < len(self._data):
            raise self._misfit(f"{len(self._data) - self._at} are left over")

    def _count(self) -> int:
        count = self.number()
        if count > (len(self._data) - self._at) // _WIDTH:
            raise self._misfit(f"they end before {count} entries")
        return count

    def _misfit(self, why: str) -> LayoutError:
        return LayoutError(f"these {len(self._data)} bytes are no {self._what}: {why}.")
