"""What a benchmark hands back: figures with their spread, their floor in the same run, and the goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from benchmarks.stats import Summary, summarise

Unit = Literal["us", "ms", "s", "MB", "GB/s", "per s", "lines", "messages", "count"]
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


class Goal(NamedTuple):
    """``limit`` is in the figure's unit, or in times of the floor when ``kind`` is "x floor"."""

    kind: Literal["at most", "at least", "x floor"]
    limit: float

    def __str__(self) -> str:
        return f"<= {self.limit:g} x floor" if self.kind == "x floor" else f"{self.kind} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """One measured quantity of one subject.

    benchmark, what, size: the question's group, the quantity, at which size: "calls", "call", "8 ranks".
    subject: "meshbook" or the name of a floor.
    floor, ratio: which floor it is divided by, and the quotient of medians; above 1 is slower, for rates too.
    """

    benchmark: str
    what: str
    size: str
    subject: str
    unit: Unit
    summary: Summary
    floor: str = ""
    ratio: float | None = None
    goal: Goal | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the goal; None without a goal, or without the floor that it needs."""
        if self.goal is None:
            return None
        if self.goal.kind == "x floor":
            return None if self.ratio is None else self.ratio <= self.goal.limit
        median = self.summary.median
        return median <= self.goal.limit if self.goal.kind == "at most" else median >= self.goal.limit


class Settings(NamedTuple):
    """How much to measure: ``quick`` takes few samples and leaves out the largest sizes."""

    quick: bool

    def count(self, full: int) -> int:
        """Return ``full``, or about a fifth of it when quick."""
        return max(3, full // 5) if self.quick else full


class Benchmark(Protocol):
    """A module of this package that answers one question."""

    QUESTION: str

    def run(self, settings: Settings) -> Iterator[Figure]:
        """Yield figures as they are measured."""
        ...


def timed(
    benchmark: str,
    what: str,
    size: str,
    unit: Unit,
    seconds: Sequence[float],
    *,
    subject: str = "meshbook",
    goal: Goal | None = None,
) -> Figure:
    """Return the figure of durations given in seconds, shown in ``unit``."""
    summary = summarise(seconds).scaled(_PER_SECOND[unit])
    return Figure(benchmark, what, size, subject, unit, summary, goal=goal)


def side_by_side(
    benchmark: str,
    what: str,
    size: str,
    unit: Unit,
    seconds: Mapping[str, Sequence[float]],
    *,
    goals: Mapping[str, Goal] | None = None,
) -> Iterator[Figure]:
    """Yield one figure per floor, then meshbook's: one per floor, each with its ratio and that floor's goal.

    seconds: samples by subject; "meshbook" is the one compared, and may be absent.
    goals: by floor; a goal in absolute units may be given under "meshbook".
    """
    goals = goals or {}
    floors = {name: summarise(samples) for name, samples in seconds.items() if name != "meshbook"}
    for name in floors:
        yield timed(benchmark, what, size, unit, seconds[name], subject=name)
    if "meshbook" not in seconds:
        return
    ours = summarise(seconds["meshbook"])
    shown = ours.scaled(_PER_SECOND[unit])
    for name, floor in floors.items():
        ratio = ours.median / floor.median
        goal = goals.get(name)
        yield Figure(benchmark, what, size, "meshbook", unit, shown, name, ratio, goal)
    if "meshbook" in goals or not floors:
        yield Figure(benchmark, what, size, "meshbook", unit, shown, goal=goals.get("meshbook"))
