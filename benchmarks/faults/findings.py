"""What a campaign found, and how it is told."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report import aligned, number
from benchmarks.stats import summarise
from meshbook import ProcMesh
from meshbook.errors import MeshError
from meshbook.mesh.proc_view import ask

ALIVE_S = 60.0
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
    def judging(self, what: str, mesh: ProcMesh | None = None) -> Iterator[None]:
        """Note how a block ends: a timeout is a hang, and another error of the mesh, or of an assertion, is wrong.

        mesh: asked for its collectives, and interrupted, when something hangs.
        """
        lead = f"{what}: " if what else ""
        try:
            yield
        except TimeoutError as error:
            where = "" if mesh is None else f" {ask(mesh, object, 'collectives', timeout_s=5)}"
            self.hangs.append(f"{lead}{error}{where}")
            if mesh is not None:
                mesh.interrupt()
        except (AssertionError, MeshError, UnicodeError) as error:
            self.wrong.append(f"{lead}{type(error).__name__}: {str(error)[:SHOWN_CHARS]}")

    def try_ways(
        self,
        mesh: ProcMesh,
        ways: Sequence[Callable[[Any], object]],
        draw_input: Callable[[], Any],
        draw: random.Random,
        count: int,
    ) -> None:
        """Try random ways with random inputs; after each the mesh has its state, and lives."""
        mesh.run("state = 42").get(ALIVE_S)
        for _ in range(count):
            way, given = draw.choice(ways), draw_input()
            self.count(way.__name__)
            began = time.monotonic()
            with self.judging(f"{way.__name__} {given!r}"):
                way(given)
                assert set(mesh.pull("state").get(ALIVE_S).values()) == {42}
            self.time(way.__name__, time.monotonic() - began)
            if mesh.lost or self.hangs:
                break

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
