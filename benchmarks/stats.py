"""Samples, what is said about them, and loops that take them.

Standard library only: the peers' environments run it too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Summary(NamedTuple):
    """What is reported of many samples, in the samples' own unit; ``low`` and ``high`` are the quartiles."""

    samples: int
    median: float
    p99: float
    low: float
    high: float

    def scaled(self, factor: float) -> Summary:
        """Return the same in another unit."""
        return Summary(self.samples, *(value * factor for value in self[1:]))


def summarise(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample; p99 of fewer than 100 samples is the largest of them."""
    ordered = sorted(samples)
    last = len(ordered) - 1

    def quantile(share: float) -> float:
        below = int(share * last)
        return ordered[below] + (share * last - below) * (ordered[min(below + 1, last)] - ordered[below])

    p99 = quantile(0.99) if last >= 99 else ordered[-1]
    return Summary(len(ordered), statistics.median(ordered), p99, quantile(0.25), quantile(0.75))


def seconds(action: Callable[[], object]) -> float:
    """Return how long one call of ``action`` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def repeat(action: Callable[[], object], *, count: int, warmup: int = 1) -> list[float]:
    """Return the seconds of ``count`` calls, after ``warmup`` calls that are not kept."""
    for _ in range(warmup):
        action()
    return [seconds(action) for _ in range(count)]


def interleave(
    subjects: Mapping[str, Callable[[], object]], *, rounds: int, per_round: int, warmup: int
) -> dict[str, list[float]]:
    """Return the seconds of each subject's calls, taken in turns so that all see the same machine.

    Each round runs ``per_round`` calls of every subject, in an order that shifts by one from round to round.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    for name in names:
        for _ in range(warmup):
            subjects[name]()
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name] += repeat(subjects[name], count=per_round, warmup=1)
    return samples
