"""What a campaign found, and how it is told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.report import aligned, number
from benchmarks.stats import summarise
from meshbook.errors import MeshError

SHOWN = 20
SHOWN_CHARS = 500


@dataclass
class Findings:
    """Of one campaign. Anything in ``hangs``, ``wrong`` or ``left`` is a fault of ours."""

    name: str
    size: str
    seconds: float = 0.0
    hangs: list[str] = field(default_factory=list)  # what did not end by its deadline
    wrong: list[str] = field(default_factory=list)
    """Results and prints that were lost, doubled, out of order or not what they must be; errors of the wrong kind."""
    left: list[str] = field(default_factory=list)  # processes, files and names that were left behind
    times: dict[str, list[float]] = field(default_factory=dict)  # what was timed, to its samples in seconds
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def time(self, what: str, seconds: float) -> None:
        self.times.setdefault(what, []).append(seconds)

    @contextlib.contextmanager
    def running(self) -> Iterator[Findings]:
        """Take the time of the campaign, which is the block; an error that ends it is a hang, or wrong."""
        started = time.monotonic()
        with self.judging(""):
            yield self
        self.seconds = time.monotonic() - started

    @contextlib.contextmanager
    def judging(self, what: str) -> Iterator[None]:
        """Note how a block ends: a timeout is a hang, and another error of the mesh, or of an assertion, is wrong."""
        lead = f"{what}: " if what else ""
        try:
            yield
        except TimeoutError as error:
            self.hangs.append(f"{lead}{error}")
        except (AssertionError, MeshError, UnicodeError) as error:
            self.wrong.append(f"{lead}{type(error).__name__}: {str(error)[:SHOWN_CHARS]}")

    @property
    def ok(self) -> bool:
        return not (self.hangs or self.wrong or self.left)

    def head(self) -> str:
        """One line: how much, and what must be nothing."""
        return (
            f"{self.name}, {self.size}: {len(self.hangs)} hangs, {len(self.wrong)} wrong or lost or doubled, "
            f"{len(self.left)} left behind; {self.seconds:.0f} s"
        )

    def lines(self) -> list[str]:
        """All of it, for a screen."""
        lines = [self.head()]
        if self.counts:
            lines.append("  " + ", ".join(f"{what} {count:,}" for what, count in sorted(self.counts.items())))
        if self.times:
            rows = [("  timed (ms)", "n", "median", "p99", "max"), *(self._row(what) for what in sorted(self.times))]
            lines += aligned(rows).splitlines()
        lines += [f"  {note}" for note in self.notes]
        for title, found in (("hang", self.hangs), ("wrong", self.wrong), ("left", self.left)):
            lines += [f"  {title}: {text}" for text in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"  {title}: and {len(found) - SHOWN} more")
        return lines

    def _row(self, what: str) -> tuple[str, ...]:
        samples = self.times[what]
        summary = summarise(samples).scaled(1000)
        worst = number(max(samples) * 1000)
        return (f"  {what}", str(len(samples)), number(summary.median), number(summary.p99), worst)

    def table(self) -> list[str]:
        """The times, for a document."""
        rows = [self._row(what) for what in sorted(self.times)]
        head = ["| timed, in ms | n | median | p99 | max |", "| --- | --- | --- | --- | --- |"]
        return [*head, *("| " + " | ".join(cell.strip() for cell in row) + " |" for row in rows)] if rows else []
