"""The content of the widget at one moment, in the compact form in which it travels to the browser. Pure.

Two parts: the *layout* (axes, hosts, pids, devices) changes only when the mesh does; the *live* part goes out at each
tick. Both hold columns over all ranks, and repeated texts once, so that 4,096 ranks are some 50 kB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import NamedTuple, TypeAlias

from meshbook.errors import FailureKind
from meshbook.formatting import format_ranks, name_ranks
from meshbook.groups.deadlock import Verdict
from meshbook.mesh.states import RankStatus
from meshbook.system.devices import GpuUse
from meshbook_extension.notebook.error_log import LoggedError
from meshbook_extension.output.labels import count, format_seconds
from meshbook_extension.output.line_reader import BarProgress

ERRORS = 6
"""The number of newest errors that travel."""
LONGEST = 300
"""The characters of each."""

KB, MB = 1_000, 1_000_000

STARTING, IDLE, BUSY, COLLECTIVE, INTERRUPTED, PDB, STOPPED, SILENT, DEAD = "SIBCXPTUD"

NAMES = {
    STARTING: "starting",
    IDLE: "idle",
    BUSY: "busy",
    COLLECTIVE: "in a collective",
    INTERRUPTED: "interrupted, still busy",
    PDB: "stopped in pdb",
    STOPPED: "stopped",
    SILENT: "silent",
    DEAD: "dead",
}

_NAMED = {"starting": STARTING, "idle": IDLE, "stopped": STOPPED, "pdb": PDB, "silent": SILENT, "dead": DEAD}


def letter_of(status: RankStatus, *, interrupted: bool = False) -> str:
    """Return the letter for a rank; ``interrupted``: whether its call was interrupted and has not ended."""
    if not status.pid and status.state != "dead":
        return STARTING
    if status.state in _NAMED:
        return _NAMED[status.state]
    if interrupted:
        return INTERRUPTED
    return COLLECTIVE if status.in_collective else BUSY


CALM, NEWS, WARNING, BAD = "calm", "news", "warning", "bad"
"""The levels of a sentence."""
HELD_S = 3.0
"""The time after which ranks that wait for another one are worth a warning."""
_CONCERNS = (
    (DEAD, BAD, "dead", "heal"),
    (SILENT, WARNING, "silent", "stacks"),
    (STOPPED, WARNING, "stopped", "logs"),
    (PDB, NEWS, "stopped in pdb", "pdb"),
)
"""The states that a person should know of, with the action that helps; the gravest first."""


BEHIND = 0.02
"""The part of a progress bar by which a rank that is named is behind the mean."""


class Sentence(NamedTuple):
    """The state of a mesh in one sentence."""

    level: str
    text: str
    ranks: tuple[int, ...] = ()
    """The ranks that the sentence is about."""
    helps: tuple[str, ...] = ()
    """The buttons that help now; the first one most."""


@dataclass(frozen=True)
class CellNow:
    """A cell that runs, with its progress."""

    what: str
    seconds: float
    ranks: int
    ended: int
    """The number of ranks that have ended it."""
    progress: BarProgress | None = None

    def describe(self) -> str:
        """Write ``cell 7 runs for 74.2 s: epoch 3, 62 %, 00:38 left, rank 5 at 41 %``."""
        bar, told = self.progress, []
        if bar is not None:
            told = [*([bar.title] if bar.title else []), f"{bar.mean:.0%}".replace("%", " %")]
            told += [f"{bar.left} left"] if bar.left else []
            if bar.ranks > 1 and bar.mean - bar.least > BEHIND:
                told.append(f"rank {bar.slowest} at {int(100 * bar.least)} %")
        if self.ended:
            told.append(f"{self.ended} of {count(self.ranks, 'rank')} ended")
        return _join(f"{self.what} runs for {format_seconds(self.seconds)}", ", ".join(told))


@dataclass(frozen=True)
class Snapshot:
    """The mesh at one moment."""

    name: str
    device: str
    sizes: Mapping[str, int]
    statuses: Sequence[RankStatus]
    interrupted: frozenset[int] = frozenset()
    """The ranks that run or await a call that was interrupted."""
    cells: Sequence[CellNow] = ()
    errors: Sequence[LoggedError] = ()
    at: float = 0.0
    """The time in seconds since the epoch."""
    moved: Sequence[int] = ()
    """The bytes per second through the process groups, per rank; empty where they are not known."""
    curves: str = ""
    """The picture of the scalars that are watched, as HTML; empty where none was logged."""
    hosts: int = 0
    """The number of hosts, which may have the same name; 0 for the number of names."""
    verdict: Verdict | None = None
    """The ranks that hold others up, if there are any."""
    waits: Sequence[int] = ()
    """The percent of its time that each rank has waited in collectives lately, -1 where it is not known."""
    steps: Sequence[str] = ()
    """The step that each rank has come to, by its progress bar or by what it logs; empty texts where there is none."""
    settled: frozenset[int] = frozenset()
    """The numbers of errors whose ranks have run a later cell well."""
    is_auto: bool = False
    """Whether every cell of the notebook goes to the mesh."""

    @property
    def states(self) -> str:
        """A letter per rank, of `NAMES`."""
        return "".join(letter_of(one, interrupted=one.rank in self.interrupted) for one in self.statuses)

    @property
    def sentence(self) -> Sentence:
        """The state in one sentence: what is worst, else what runs, else that nothing does."""
        states = self.states
        for letter, level, words, helps in _CONCERNS:
            if chosen := [one for one, its in zip(self.statuses, states, strict=True) if its == letter]:
                ranks = tuple(one.rank for one in chosen)
                places = dict.fromkeys(one.where for one in chosen if one.where not in ("", one.state))
                where = next(iter(places)) if len(places) == 1 else ""
                are = "is" if len(ranks) == 1 else "are"
                return Sentence(level, _join(f"{name_ranks(ranks)} {are} {words}", where), ranks, (helps,))
        if self.verdict is not None:
            return self._describe_verdict(self.verdict)
        stuck = tuple(one.rank for one, its in zip(self.statuses, states, strict=True) if its == INTERRUPTED)
        if stuck:
            are = "was interrupted and is" if len(stuck) == 1 else "were interrupted and are"
            return Sentence(WARNING, f"{name_ranks(stuck)} {are} still busy", stuck, ("interrupt", "stacks"))
        if self.cells:
            cell, *others = self.cells
            more = f"; {count(len(others), 'other cell')} beside it" if others else ""
            return Sentence(NEWS, f"{cell.describe()}{more}")
        busy = [one.rank for one, its in zip(self.statuses, states, strict=True) if its not in (IDLE, STARTING)]
        if busy:
            return Sentence(NEWS, f"{name_ranks(busy)} {'is' if len(busy) == 1 else 'are'} busy")
        waiting = states.count(STARTING)
        return Sentence(CALM, f"{waiting} of {count(len(states), 'rank')} starting" if waiting else "idle")

    def _describe_verdict(self, verdict: Verdict) -> Sentence:
        since = format_seconds(verdict.since_s)
        if verdict.circular:
            text = f"{name_ranks({*verdict.odd, *verdict.waiting})} wait for each other, {since}"
        else:
            places = {one.rank: one.where for one in self.statuses if one.where not in ("", one.state)}
            where = places.get(verdict.odd[0], "idle") if len(verdict.odd) == 1 else ""
            hold = "holds" if len(verdict.odd) == 1 else "hold"
            text = f"{_join(f'{name_ranks(verdict.odd)} {hold} the others up', where)}, {since}"
        return Sentence(WARNING, text, verdict.odd, ("stacks", "pdb", "interrupt"))

    @property
    def memory_mb(self) -> list[int]:
        """The resident memory of each rank."""
        return [round(one.rss_bytes / MB) for one in self.statuses]

    @property
    def moved_kb_s(self) -> list[int]:
        """The throughput of the process groups per rank."""
        return [round(rate / KB) for rate in self.moved]

    @property
    def gpu_percent(self) -> list[int]:
        """The load of each rank's device, -1 where it is not known; empty without a GPU."""
        return self._of_gpus(lambda gpu: gpu.busy_percent if gpu is not None else -1)

    def _of_gpus(self, figure: Callable[[GpuUse | None], int]) -> list[int]:
        gpus = [one.gpu for one in self.statuses]
        return [figure(gpu) for gpu in gpus] if any(gpus) else []

    def layout(self) -> dict[str, object]:
        """Return the part that rarely changes."""
        hosts, host_of = _table(one.host for one in self.statuses)
        devices, device_of = _table(one.device for one in self.statuses)
        ranks = [one.rank for one in self.statuses]
        return {
            "name": self.name,
            "device": self.device,
            "axes": list(self.sizes),
            "sizes": list(self.sizes.values()),
            "ranks": [] if ranks == list(range(len(ranks))) else ranks,
            "hosts": hosts,
            "host_count": self.hosts or len(hosts),
            "host_of": host_of,
            "devices": devices,
            "device_of": device_of,
            "pids": [one.pid for one in self.statuses],
            "gpu_total_mb": self._of_gpus(lambda gpu: round(gpu.total_bytes / MB) if gpu is not None else 0),
        }

    def live(self) -> dict[str, object]:
        """Return the part that changes at each tick."""
        texts, text_of = _table("" if one.where == one.state else one.where for one in self.statuses)
        kept = [round(one.kept_bytes / MB) for one in self.statuses]
        return {
            "at": self.at,
            "states": self.states,
            "busy_ds": [round(10 * one.busy_s) for one in self.statuses],
            "memory_mb": self.memory_mb,
            "kept_mb": kept if any(kept) else [],
            "moved_kb_s": self.moved_kb_s,
            "gpu_percent": self.gpu_percent,
            "gpu_used_mb": self._of_gpus(lambda gpu: round(gpu.used_bytes / MB) if gpu is not None else 0),
            "gpu_own_mb": self._of_gpus(lambda gpu: round(gpu.own_bytes / MB) if gpu is not None else 0),
            "curves": self.curves,
            "say": self.sentence._asdict(),
            "odd": list(self.verdict.odd) if self.verdict else [],
            "waiting": list(self.verdict.waiting) if self.verdict else [],
            "waits": list(self.waits),
            "steps": list(self.steps) if any(self.steps) else [],
            "auto": self.is_auto,
            "texts": texts,
            "text_of": text_of,
            "cells": [asdict(cell) | {"progress": cell.progress and cell.progress._asdict()} for cell in self.cells],
            "errors": [
                {
                    "number": error.number,
                    "settled": error.number in self.settled,
                    "lost": error.kind is FailureKind.LOST,
                    "what": error.what,
                    "where": error.where,
                    "at": error.at,
                    "ranks": format_ranks(error.ranks),
                    "text": error.headline[:LONGEST],
                }
                for error in self.errors[-ERRORS:]
            ],
        }


def _join(text: str, more: str) -> str:
    return f"{text}: {more}" if more else text


def _table(values: Iterable[str]) -> tuple[list[str], list[int]]:
    """Return the distinct values, and for each entry the index of its own."""
    numbers: dict[str, int] = {}
    indices = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), indices


POINTS = 120
"""The number of ticks that the charts show."""

LEAST_S = 0.4
"""The least time between two readings that give a rate."""

Spread: TypeAlias = tuple[int, int, int]
"""The least, the median and the largest of the ranks."""


class History:
    """The last `POINTS` ticks. A chart without values stays empty."""

    def __init__(self) -> None:
        names = ("memory_mb", "moved_kb_s", "gpu_percent", "waits")
        self._charts: dict[str, deque[Spread]] = {name: deque(maxlen=POINTS) for name in names}

    def add(self, snapshot: Snapshot) -> None:
        """Take in one more tick."""
        columns = {
            "memory_mb": [mb for mb in snapshot.memory_mb if mb],
            "moved_kb_s": snapshot.moved_kb_s,
            "gpu_percent": [percent for percent in snapshot.gpu_percent if percent >= 0],
            "waits": [percent for percent in snapshot.waits if percent >= 0],
        }
        for name, values in columns.items():
            if values:
                self._charts[name].append((min(values), median_low(values), max(values)))

    def live(self) -> dict[str, list[Spread]]:
        """Return the points that travel to the browser."""
        return {name: list(points) for name, points in self._charts.items()}


class Rates:
    """The rates of counters of ranks, which only grow: bytes moved, seconds waited."""

    def __init__(self) -> None:
        self._counted: Mapping[int, tuple[int, float]] = {}
        self._at = float("-inf")
        self._rates: dict[int, float] = {}

    def per_second(self, counted: Mapping[int, tuple[int, float]], at_s: float) -> dict[int, float]:
        """Return what each rank's counter gained per second since the last reading; nothing for a rank started since.

        counted: pid and counter by rank. at_s: monotonic.
        """
        passed = at_s - self._at
        if passed >= LEAST_S:
            self._rates = {
                rank: (value - before[1]) / passed
                for rank, (pid, value) in counted.items()
                if (before := self._counted.get(rank)) is not None and before[0] == pid and value >= before[1]
            }
            self._counted, self._at = counted, at_s
        return self._rates
