"""What each rank has printed, whichever of its lines are shown together with those of other ranks."""

from __future__ import annotations

import re

_LABELLED = re.compile(r"^\[([0-9,-]+)\] (.*)$", re.MULTILINE)


def by_rank(text: str) -> dict[int, list[str]]:
    """Return the lines of each rank: ``[0,2] a`` is a line of ranks 0 and 2, and ``a`` of none."""
    lines: dict[int, list[str]] = {}
    for label, line in _LABELLED.findall(text):
        for part in label.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                lines.setdefault(rank, []).append(line)
    return lines


def each_of(ranks: int, *lines: str) -> dict[int, list[str]]:
    """Return what `by_rank` does where so many ranks print these lines."""
    return {rank: list(lines) for rank in range(ranks)}
