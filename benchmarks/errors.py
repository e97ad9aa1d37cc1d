"""How soon the caller knows: of an error, of a death, and that an interrupt was obeyed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

from benchmarks.cells import WatchedCell
from benchmarks.figures import Figure, Goal, Settings, timed
from benchmarks.subject import mesh, pids
from meshbook import ProcMesh
from meshbook.calls.output import RankDone

QUESTION = (
    "One rank of 8 raises while 7 are busy for 2 s: time from the raise to the caller's event. An interrupt of a "
    "sleeping cell: time until all 8 ranks have ended it. SIGKILL of one rank in a cell: time to the event."
)
RANKS = 8
BUSY_S = 2.0
RAISES = f"""
import time
if rank == 3:
    time.sleep(0.3)
    raise ValueError(f"raised at {{time.monotonic()}}")
time.sleep({BUSY_S})
"""
SLEEPS = "import time\nprint('asleep')\ntime.sleep(60)"


def run(settings: Settings) -> Iterator[Figure]:
    """Errors and interrupts on one mesh, a new mesh for each death."""
    with mesh(RANKS) as procs:
        yield from _raised(procs, settings.count(10))
        yield from _interrupted(procs, settings.count(20))
    yield from _killed(settings.count(10))


def _raised(procs: ProcMesh, count: int) -> Iterator[Figure]:
    """The rank says when it raised; all processes of a host share the monotonic clock."""
    known, ended = [], []
    for _ in range(count):
        cell = WatchedCell(procs, RAISES)
        seen = cell.first_failure()
        ended.append(cell.wait() - cell.started_s)
        raised = re.search(r"raised at ([\d.]+)", str(seen.event))
        if raised is None:
            raise AssertionError(f"the failure does not show what the rank raised: {seen.event}")
        known.append(seen.at_s - float(raised[1]))
    size = f"1 of {RANKS} ranks"
    yield timed("errors", "raise seen", size, "ms", known, goal=Goal("at most", 5))
    yield timed("errors", "whole cell", size, "s", ended)


def _interrupted(procs: ProcMesh, count: int) -> Iterator[Figure]:
    """From `CellRun.cancel` until the cell's future is done."""
    ended = []
    for _ in range(count):
        cell = WatchedCell(procs, SLEEPS)
        cell.wait_for_output(RANKS)
        time.sleep(0.05)
        interrupted = time.monotonic()
        cell.run.cancel()
        ended.append(cell.wait() - interrupted)
    goal = Goal("at most", 300)
    yield timed("errors", "interrupt of a sleep", f"{RANKS} ranks", "ms", ended, goal=goal)


def _killed(count: int) -> Iterator[Figure]:
    """From SIGKILL to the event of the dead rank."""
    known = []
    for _ in range(count):
        with mesh(RANKS) as procs:
            victim = pids(procs)[3]
            cell = WatchedCell(procs, SLEEPS)
            cell.wait_for_output(RANKS)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            seen = cell.first_failure()
            assert isinstance(seen.event, RankDone) and seen.event.rank == 3
            known.append(seen.at_s - killed)
            cell.run.cancel()
    goal = Goal("at most", 50)
    yield timed("errors", "death seen", f"1 of {RANKS} ranks", "ms", known, goal=goal)
