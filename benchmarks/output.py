"""What happens when every rank prints as fast as it can."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks import floors
from benchmarks.cells import WatchedCell
from benchmarks.figures import Figure, Goal, Settings, side_by_side, timed
from benchmarks.machine import busy_loops
from benchmarks.notebook import Notebook
from benchmarks.stats import summarise
from benchmarks.subject import mesh
from meshbook import ProcMesh

QUESTION = (
    "8 ranks print 100,000 lines each in one cell: time until all have ended, lines missing in the logs, "
    "messages sent to the notebook, how fast a question to the mesh is answered meanwhile, and how fast "
    "an interrupt ends it; and from Shift-Enter until a stock ipykernel is idle. Floor: as many bare processes "
    "printing into pipes that one process reads. 20,000 lines of each rank, equal or differing, alone and beside 24 "
    "busy loops: until the kernel is idle, its CPU time, and messages that came after."
)
RANKS = 8
LIMIT_S = 300.0  # for a cell on a machine where others compute
LINES = 100_000
SIZE = f"{RANKS} x {LINES:,} lines"
FLOOD = f"for number in range({LINES}):\n    print(f'line {{number}} of a flood')"
LINES_OF_CELL = 20_000
TEXTS = {"equal": "line {number} of a flood", "differing": "line {number} of rank {rank} in a flood"}
LOOPS = (0, 24)
ENDLESS = "while True:\n    print('a line of an endless flood')"


def run(settings: Settings) -> Iterator[Figure]:
    """The flood several times, then interrupts of an endless one."""
    with mesh(RANKS) as procs:
        yield from _flood(procs, settings.count(5))
        yield from _interrupted(procs, settings.count(10))
    notebook = Notebook()
    try:
        took = [notebook.run(f"%%mesh\n{FLOOD}") for _ in range(settings.count(5) + 1)][1:]
        yield Figure("output", "in a notebook", SIZE, "meshbook", "s", summarise(took), goal=Goal("at most", 1.5))
        yield from _until_idle(notebook, settings.count(10))
    finally:
        notebook.close()


def _flood(procs: ProcMesh, count: int) -> Iterator[Figure]:
    """Print, count what arrived, and ask for the status all the while."""
    floor, ours, lost, messages, answers = [], [], [], [], []
    for turn in range(count + 1):
        floor_s, _ = floors.flood(RANKS, LINES)
        before = _lines_logged(procs)
        cell = WatchedCell(procs, FLOOD)
        latencies = []
        while not cell.run.future.done():
            asked = time.perf_counter()
            procs.status()
            latencies.append(time.perf_counter() - asked)
            time.sleep(0.02)
        took = cell.wait() - cell.started_s
        if turn:
            floor.append(floor_s)
            ours.append(took)
            lost.append(float(RANKS * LINES - (_lines_logged(procs) - before)))
            messages.append(float(cell.messages()))
            answers += latencies
    samples = {"pipes": floor, "meshbook": ours}
    yield from side_by_side("output", "flood", SIZE, "s", samples, goals={"meshbook": Goal("at most", 0.6)})
    nothing = Goal("at most", 0)
    yield Figure("output", "missing in logs", SIZE, "meshbook", "lines", summarise(lost), goal=nothing)
    yield Figure("output", "published", SIZE, "meshbook", "messages", summarise(messages))
    yield timed("output", "status meanwhile", SIZE, "ms", answers)


def _interrupted(procs: ProcMesh, count: int) -> Iterator[Figure]:
    """From the interrupt to the end of the cell on all ranks."""
    ended = []
    for _ in range(count):
        cell = WatchedCell(procs, ENDLESS)
        cell.wait_for_output(RANKS)
        time.sleep(0.3)
        interrupted = time.monotonic()
        cell.run.cancel()
        ended.append(cell.wait() - interrupted)
    yield timed("output", "interrupt meanwhile", f"{RANKS} ranks", "ms", ended)


def _until_idle(notebook: Notebook, count: int) -> Iterator[Figure]:
    """Run cells whose ranks print much, alone and where others compute, each of whom the scheduler gives as much."""
    kernel = psutil.Process(notebook.manager.provisioner.pid)  # type: ignore[union-attr]
    for loops, (kind, text) in itertools.product(LOOPS, TEXTS.items()):
        took, cpu, late = [], [], []
        with busy_loops(loops):
            for _ in range(count):
                before = sum(kernel.cpu_times()[:2])
                code = f"for number in range({LINES_OF_CELL}): print(f'{text}')"
                took.append(notebook.run(f"%%mesh\n{code}", limit_s=LIMIT_S))
                late.append(float(_count_late(notebook)))
                cpu.append(sum(kernel.cpu_times()[:2]) - before)
        size = f"{RANKS} x {LINES_OF_CELL:,}, {loops} loops"
        yield Figure("output", f"until idle, {kind} lines", size, "meshbook", "s", summarise(took))
        yield Figure("output", f"CPU of the kernel, {kind} lines", size, "meshbook", "s", summarise(cpu))
        after = Goal("at most", 0)
        yield Figure("output", f"after idle, {kind} lines", size, "meshbook", "messages", summarise(late), goal=after)


def _count_late(notebook: Notebook) -> int:
    """Return how many messages of the last cell came when the kernel was idle, until none comes for a second."""
    late = 0
    with contextlib.suppress(queue.Empty):
        while True:
            late += notebook.client.get_iopub_msg(timeout=1)["parent_header"].get("msg_id") == notebook.last_request
    return late


def _lines_logged(procs: ProcMesh) -> int:
    """Lines of the flood in all ranks' log files."""
    return sum(_flood_lines(Path(path)) for path in procs.log_paths().values())


def _flood_lines(path: Path) -> int:
    return path.read_bytes().count(b" of a flood\n") if path.exists() else 0
