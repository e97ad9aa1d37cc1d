"""Slices: base ranks described by an offset, sizes and strides, and the grouping of lists of ranks into them.

No axis of a mesh ever moves past another, and one step along an axis is longer than all that lies inside it.
Hence strides fall from the first axis to the last, and one division per axis tells whether a rank belongs.

Import `Piece` from `meshbook.shape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple


class Piece(NamedTuple):
    """Base ranks ``offset + sum(i * stride)``, ``0 <= i < size`` along each axis: a piece of a target."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many ranks it has."""
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """The distance from the lowest member to the highest."""
        return sum((size - 1) * abs(stride) for size, stride in zip(self.sizes, self.strides, strict=True))

    def find(self, rank: int) -> int | None:
        """The position of ``rank`` in C order, or None if it is no member; O(axes)."""
        rest = rank - self.offset
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if stride < 0:  # count from the lowest member
                rest -= (size - 1) * stride
        position = 0
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            index, rest = divmod(rest, abs(stride))
            if not 0 <= index < size:
                return None
            position = position * size + (index if stride > 0 else size - 1 - index)
        return None if rest else position

    def has(self, rank: int) -> bool:
        """Whether ``rank`` is a member; O(axes)."""
        return self.find(rank) is not None

    def ranks(self) -> Iterator[int]:
        """Every member's base rank, in C order."""
        if math.prod(self.sizes) == 1:  # each call to one rank asks
            return iter((self.offset,))
        if len(self.sizes) == 1 and (step := self.strides[0]):
            return iter(range(self.offset, self.offset + self.sizes[0] * step, step))
        return self._ranks()

    def _ranks(self) -> Iterator[int]:
        *outer, inner = (
            [i * stride for i in range(size)] for size, stride in zip(self.sizes, self.strides, strict=True)
        )
        for moves in product(*outer):
            start = self.offset + sum(moves)
            for step in inner:
                yield start + step

    def is_nested(self) -> bool:
        """Whether a step along each axis is longer than all that lies inside it, and no rank is negative."""
        reach = low = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1:
                if abs(stride) <= reach:
                    return False
                reach += (size - 1) * abs(stride)
                low += min(0, (size - 1) * stride)
        return self.offset + low >= 0


def dense(shape: Sequence[int]) -> Piece:
    """The slice of all ranks of an extent with sizes ``shape``: 0, 1, 2, ..."""
    return Piece(0, tuple(shape), tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))


def fit(shape: Sequence[int], ranks: Sequence[int]) -> Piece | None:
    """The slice of sizes ``shape`` whose ranks in C order are ``ranks``, or None if there is none."""
    steps = dense(shape).strides
    strides = tuple(ranks[step] - ranks[0] if size > 1 else 1 for size, step in zip(shape, steps, strict=True))
    candidate = Piece(ranks[0], tuple(shape), strides)
    return candidate if candidate.is_nested() and list(candidate.ranks()) == list(ranks) else None


def group(ranks: Iterable[int]) -> tuple[Piece, ...]:
    """Few slices whose ranks, one after the other, are ``ranks``; each rank occurs once.

    Evenly spaced neighbours become a run, evenly spaced equal runs become a slice of two axes, and so on.
    """
    parts = [Piece(rank, (), ()) for rank in ranks]
    while True:
        grouped = _group_once(parts)
        if len(grouped) == len(parts):
            return tuple(parts)
        parts = grouped


def _group_once(parts: Sequence[Piece]) -> list[Piece]:
    grouped: list[Piece] = []
    start = 0
    while start < len(parts):
        first = parts[start]
        end = start + 1
        if end < len(parts):
            step = parts[end].offset - first.offset
            while (
                end < len(parts)
                and abs(step) > first.span
                and parts[end].offset - parts[end - 1].offset == step
                and parts[end][1:] == first[1:]
            ):
                end += 1
        if end > start + 1:
            first = Piece(first.offset, (end - start, *first.sizes), (step, *first.strides))
        grouped.append(first)
        start = end
    return grouped
